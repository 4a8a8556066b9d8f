"""The CPU platform's kernels: a C++ library beside this file, and its binding."""

// Keys and values on their way from memory.

// A cache line, into the second-level cache. Not by __builtin_prefetch: GCC takes a function that
// does nothing but that for one without effects, and drops its calls.
static inline void prefetch_line(const char *at) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %a0" ::"p"(at));
#elif defined(__aarch64__)
  __asm__ volatile("prfm pldl2keep, [%0]" ::"r"(at));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}

__attribute__((always_inline)) static inline void prefetch_row(const char *row, int64_t bytes) {
  int64_t n = 0;
  for (; n + 256 <= bytes; n += 256) {
    prefetch_line(row + n);
    prefetch_line(row + n + 64);
    prefetch_line(row + n + 128);
    prefetch_line(row + n + 192);
  }
  for (; n < bytes; n += 64) prefetch_line(row + n);
}

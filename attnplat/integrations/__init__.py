"""Adapters to other libraries; each is imported by name and none by attnplat itself."""

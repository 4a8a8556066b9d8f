"""What the CPU platform runs itself."""

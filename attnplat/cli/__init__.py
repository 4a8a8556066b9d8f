"""The command line: `attnplat COMMAND`."""

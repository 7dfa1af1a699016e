"""Builds the macOS arm64 wheel on Linux, and checks what can be checked of it without a Mac."""

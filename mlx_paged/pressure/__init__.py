"""What an engine releases while the system is short of memory."""

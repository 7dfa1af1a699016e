"""What an engine gives back while the system is short of memory."""

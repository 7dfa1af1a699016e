"""The server and the generate command under test, with fixtures."""

"""The requests and answers of the three HTTP APIs as data: how they are read and written."""

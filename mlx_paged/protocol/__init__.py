"""The requests and responses of the three HTTP APIs as data: how they are read and written."""

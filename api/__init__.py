"""The HTTP interface of one member."""

"""The command `pods`."""

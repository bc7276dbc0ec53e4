"""Emulated hosts: processes with a home folder, chips and an SSH server."""

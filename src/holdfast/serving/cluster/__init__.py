"""This server among the members that share its journal: its lease, and requests for sessions that others own."""

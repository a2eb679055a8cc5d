"""Several servers that share one journal, under faults and under load."""

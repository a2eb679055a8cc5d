"""A session that can leave its server: what it holds, the file it travels in, and whether it fits elsewhere."""

"""What happened in a chat session: turns, the tree they form, and what is made of it."""

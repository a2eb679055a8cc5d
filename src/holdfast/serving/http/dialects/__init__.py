"""Other APIs for the same chats: requests become chat completion requests, replies become theirs."""

"""The same client for asyncio. Each file mirrors the blocking one of its name; what they decide is shared."""

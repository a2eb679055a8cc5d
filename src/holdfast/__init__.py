"""Session-bound LLM inference for long-lived agents."""

__version__ = "0.1.0"

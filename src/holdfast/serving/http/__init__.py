"""The HTTP door: OpenAI's API on sessions and without, for chats and for those who train on them."""

from holdfast.serving.http.app import create_app
from holdfast.serving.http.routes_upstream import Upstream

__all__ = ["Upstream", "create_app"]

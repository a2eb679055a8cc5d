"""The HTTP endpoint: OpenAI's API, stateless and on sessions, and what trainers need."""

from holdfast.serving.http.app import create_app
from holdfast.serving.http.routes_sessions import Upstream

__all__ = ["Upstream", "create_app"]

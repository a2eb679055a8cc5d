"""The gRPC endpoint: sessions of raw tokens."""

from holdfast.serving.grpc.server import GrpcServer, create_server

__all__ = ["GrpcServer", "create_server"]

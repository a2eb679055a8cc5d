"""The endpoints: gRPC and HTTP, with one error table each and one set of API keys."""

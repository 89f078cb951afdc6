"""The API's requests and responses as pydantic models, used at the edge only: `wire.parse` validates a request."""

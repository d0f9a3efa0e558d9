"""Errors as the clients' protocols have them: a status, a sentence, and the field that is wrong."""

from typing import Any

from m3jax.messages import printable, shortened

# The types that OpenAI's and Anthropic's clients know, by status.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request that is refused, or that failed.

    Args:
      status: of HTTP.
      message: one line: what was given, what is allowed, what to do.
      field: of the request, such as "messages" or "tools[0].function.name"; None where no field is to blame.
      code: a word for programs, such as "model_not_found".
      retry_after: seconds after which to try again; None says nothing.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(shortened(printable(message)))
        self.status, self.field, self.code, self.retry_after = status, field, code, retry_after

    @property
    def message(self) -> str:
        """The sentence, with the field's name in front where it does not have it."""
        text = str(self)
        return text if self.field is None or self.field.split("[")[0] in text else f"{self.field}: {text}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that go with it."""
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return out | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    def as_openai(self) -> dict[str, Any]:
        """Return the body of OpenAI's protocol, also an event of its streams."""
        type_name = _OPENAI_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": type_name, "param": self.field, "code": self.code}}

    def as_anthropic(self) -> dict[str, Any]:
        """Return the body of Anthropic's protocol, also an event of its streams."""
        type_name = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": type_name, "message": self.message}}


def refused(field: str | None, message: str, code: str | None = None) -> ApiError:
    """Return the error of a request that is wrong: status 400."""
    return ApiError(400, message, field, code)

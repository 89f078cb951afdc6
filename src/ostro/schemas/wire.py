"""The base of all wire objects: strict JSON, null as the default, and errors that name the field at fault.

Knows pydantic; knows no endpoint. Requests go through `parse`, which turns any error into one BadRequest.
"""

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from ostro.errors import BadRequest, OstroError, Unsupported

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_LONGEST_NAME = 64


class WireModel(BaseModel):
    """An object of the API. Strict: "1" is not a number, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    # Reads like a dict of the same JSON, for code written for one: answer["choices"][0]["message"]["content"].

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def get(self, name: str, default: object = None) -> Any:
        return getattr(self, name) if name in self else default


def left_out() -> Any:
    """A response field that is omitted, rather than null, if it has no value."""
    return Field(default=None, exclude_if=lambda value: value is None)


class RequestModel(WireModel):
    """An object that clients send. Null means default, whatever the field."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """OpenAI's fields that cannot change the output: accepted and ignored."""
    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """OpenAI's fields for what Ostro does not support, each with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None and name not in cls.ignored}
        for name, harmless in cls.unserved.items():
            if name in given and given.pop(name) not in harmless:
                raise refusal(name, "is not supported", kind=_UNSUPPORTED)
        # Keep one unknown field for the error: pydantic would describe each, and a body has room for very many.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in [name for name in given if name not in known][1:]:
            del given[name]
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Documents nulls and fields without effect too."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        properties, required = schema.setdefault("properties", {}), schema.get("required", ())
        for name, field in properties.items():
            if name not in required:
                properties[name] = {"anyOf": [field, {"type": "null"}]}
        properties |= {name: {"description": "Accepted; has no effect."} for name in sorted(cls.ignored)}
        for name, harmless in cls.unserved.items():
            properties[name] = {"enum": [*harmless, None], "description": "Not supported."}
        return schema


_REFUSED, _UNSUPPORTED = "refused", "unsupported"


def refusal(field: str, complaint: str, *, kind: str = _REFUSED) -> PydanticCustomError:
    """The error that a model validator raises about one field: "<field> <complaint>."."""
    return PydanticCustomError(kind, "{complaint}", {"field": field, "complaint": complaint})


def shape(complaint: str) -> WrapValidator:
    """One complaint about a field of several forms, in place of pydantic's about each form."""

    def check(value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError as error:
            raise PydanticCustomError(_REFUSED, "{complaint}", {"complaint": complaint}) from error

    return WrapValidator(check)


Schema = TypeVar("Schema", bound=RequestModel)


def parse(schema: type[Schema], body: object) -> Schema:
    """Validates a decoded JSON value; raises BadRequest, which names the first field at fault."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise bad_request(error) from error


def bad_request(error: ValidationError) -> BadRequest:
    """The first of pydantic's complaints, as a sentence about the field."""
    first = error.errors(include_url=False)[0]
    path = first["loc"]
    if "field" in first.get("ctx", {}):
        path = (*path, first["ctx"]["field"])
    param = _dotted(path) or None
    kind = Unsupported if first["type"] == _UNSUPPORTED else BadRequest
    return kind(f"{param or 'The request'} {_complaint(first)}.", param=param)


def _complaint(error: "ErrorDetails") -> str:
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a known field: remove it or check its spelling"
        case "model_type":
            return "must be a JSON object"
        case "refused" | "unsupported":
            return error["msg"]
    # "Input should be a valid number", "List should have at most 4 items": the subject is the field.
    _, _, predicate = error["msg"].partition(" ")
    return f"{predicate}, got {reprlib.repr(error['input'])}"


def _dotted(path: tuple[int | str, ...]) -> str:
    """The path as OpenAI writes it: messages[0].content."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}" for part in path)
    return text.removeprefix(".")


class ErrorDetail(WireModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(WireModel):
    error: ErrorDetail

    @classmethod
    def of(cls, error: OstroError) -> Self:
        detail = ErrorDetail(message=error.public, type=error.openai_type, param=error.param, code=error.openai_code)
        return cls(error=detail)


class ErrorText(WireModel):
    """An error as Ollama's clients expect it."""

    error: str

    @classmethod
    def of(cls, error: OstroError) -> Self:
        return cls(error=error.public)

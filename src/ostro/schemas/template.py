"""Variables for the chat template, which all chat dialects accept."""

from typing import Any, Self

from pydantic import Field, model_validator

from ostro.schemas.wire import RequestModel, refusal

# Variables of the template that have fields of their own in a request.
_TAKEN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class TemplateFields(RequestModel):
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `{"enable_thinking": false}`. They override the other fields."""

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name in _TAKEN_VARIABLES:
            if name in self.chat_template_kwargs:
                raise refusal(f"chat_template_kwargs.{name}", "is not a variable to set: use the request's own field")
        return self

"""Prepares a chat request for one model: plans, checks and renders it into the text of the prompt. Knows no engine
process: servers and offline batches share it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ostro.answers.plan import AnswerPlan, OutputRules, plan_answer
from ostro.answers.profile import TemplateProfile
from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest
from ostro.frontend.requests import Frontend
from ostro.server.dialects.chat_request import ChatRequest
from ostro.text.tokenizer import ChatText


class ChatPreparation:
    def __init__(self, frontend: Frontend, *, constrains: bool, max_characters: int) -> None:
        """`constrains`: whether the engine can enforce grammars. Texts longer than `max_characters` are refused."""
        self._frontend = frontend
        self._constrains = constrains
        self._max_characters = max_characters

    async def prompt(self, chat: ChatRequest) -> tuple[AnswerPlan, ChatText, OutputRules]:
        """The prompt, rendered by the model's chat template, and how to read the output. Raises BadRequest if the
        request contradicts itself, or if the messages or the text are too long.
        """
        if not self._frontend.is_probed:
            await asyncio.to_thread(lambda: self._frontend.profile)
        plan = _planned(chat, self._frontend.profile)
        self._check_length([*plan.messages, *(plan.tools or ()), plan.template_kwargs])
        rendered = await self._frontend.tokenizer.render_chat(
            plan.messages,
            tools=plan.tools,
            template_kwargs=plan.template_kwargs,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            max_characters=self._max_characters,
        )
        reading = plan.reading(rendered.text)
        return plan, rendered._replace(text=rendered.text + reading.prompt_suffix), reading

    async def constraint(self, chat: ChatRequest, plan: AnswerPlan, reading: OutputRules) -> Constraint | None:
        """The constraint on the output: a grammar for calls, which includes a structured output, or a structured output
        alone. Raises BadRequest if it cannot be compiled. That may take a while, so check first that the prompt fits
        into the context.
        """
        checker, structured = self._frontend.checker, chat.params.structured
        schemas = await self._schemas(plan)
        if reading.lazy and not self._constrains:
            # Calls are still parsed if the model writes them correctly.
            return None
        if reading.asked is None and structured is not None:
            alone = await checker.check_async(structured)
            return replace(alone, free_until=reading.free_until, free_tokens=reading.free_tokens)
        rule = None if structured is None else await checker.check_rule_async(structured)
        reading = reading.enforcing(schemas, rule)
        constraint = _constraint(chat, reading)
        if constraint is None:
            return None
        # Each part has passed on its own, but the whole may still exceed the limits.
        param = structured.kind if structured is not None and not chat.tools else "tools"
        try:
            await checker.check_constraint_async(constraint, param)
        except BadRequest:
            loosened = reading.loosened()
            constraint = None if loosened is None else _constraint(chat, loosened)
            if constraint is None:
                raise
            await checker.check_constraint_async(constraint, param)
        return constraint

    async def _schemas(self, plan: AnswerPlan) -> dict[str, Mapping[str, object]]:
        """The enforced schemas, by tool name. If a schema cannot be enforced at all, raises BadRequest if the tool is
        strict, and omits it otherwise.
        """
        outcomes = await self._frontend.checker.check_schemas_async([check.structured for check in plan.checks])
        schemas: dict[str, Mapping[str, object]] = {}
        for check, outcome in zip(plan.checks, outcomes, strict=True):
            if not isinstance(outcome, BadRequest):
                schemas[check.name] = outcome
            elif check.is_strict:
                raise check.refusal(outcome) from outcome
        return schemas

    def _check_length(self, values: Sequence[object]) -> None:
        """Raises BadRequest if the values have more characters in total than a text may have. Counts every string,
        including field names: the template may ignore it, but it is still sent to the render process.
        """
        total = 0
        left: list[object] = list(values)
        while left:
            value = left.pop()
            if isinstance(value, str):
                total += len(value)
                if total > self._max_characters:
                    raise BadRequest(
                        f"messages has more than {self._max_characters} characters in all, tools included, which no "
                        "context has room for. Send fewer or shorter messages.",
                        param="messages",
                    )
            elif isinstance(value, Mapping):
                left += value.keys()
                left += value.values()
            elif isinstance(value, Sequence):
                left += value


def _planned(chat: ChatRequest, profile: TemplateProfile) -> AnswerPlan:
    return plan_answer(
        chat.messages,
        profile,
        tools=chat.tools,
        choice=chat.tool_choice,
        parallel=chat.parallel_tool_calls,
        structured=chat.params.structured,
        reasoning=chat.reasoning,
        template_kwargs=chat.template_kwargs,
        continue_final_message=chat.continue_final_message,
    )


def _constraint(chat: ChatRequest, reading: OutputRules) -> Constraint | None:
    grammar = reading.grammar()
    if grammar is None:
        return None
    return Constraint(
        grammar=grammar,
        free_until=reading.free_until,
        free_tokens=reading.free_tokens,
        lazy=reading.lazy,
        jump_forward=chat.jump_forward,
        is_users=reading.is_users,
    )

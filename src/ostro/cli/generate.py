"""ostro generate: completes one prompt, streamed to the terminal, or a file of prompts as a batch."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ostro.cli.files import read_lines, read_text, written_whole
from ostro.cli.in_process import add_profile_option, profiled, tell_progress
from ostro.cli.options import (
    add_engine_options,
    add_sampling_options,
    add_structured_options,
    engine_config,
    sampling_params,
    structured_fields,
)
from ostro.cli.parser import describe
from ostro.errors import BadRequest, SequenceFailed
from ostro.frontend.outputs import Completion
from ostro.frontend.requests import Prompt
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams
from ostro.schemas.structured import StructuredFields
from ostro.schemas.wire import parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue; - reads standard input")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a file with one prompt per line")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON lines to this file instead of text to stdout"
    )
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user message, through the chat template"
    )
    add_sampling_options(parser)
    add_structured_options(parser)
    add_engine_options(parser)
    add_profile_option(parser)
    describe(
        parser,
        {
            'ostro generate "Once upon a time" --max-tokens 64': "continue a text",
            'ostro generate --chat "Why is the sky blue?"': "answer a question",
            "ostro generate --prompts in.txt --output out.jsonl": "write one JSON line per prompt",
            'ostro generate --chat "Is water wet?" --choice yes --choice no': "answer with one of two words",
            "ostro generate - --model qwen2.5-coder-0.5b": "read standard input, use another model",
        },
    )


def run(args: argparse.Namespace) -> int:
    structured = parse(StructuredFields, structured_fields(args)).structured
    params = sampling_params(args, SamplingParams(max_tokens=None, default_max_tokens=128, structured=structured))
    texts = _texts(args)
    # Opened first: an unwritable path should be reported before the work, not after it.
    with nullcontext(sys.stdout) if args.output is None else written_whole(args.output) as output:
        tell_progress()
        llm = LLM(config=engine_config(args))
        prompts = [_chat_prompt(llm, text, params) if args.chat else text for text in texts]
        if args.prompts is None and args.output is None and params.n == 1:
            with profiled(llm, args):
                _stream(llm, prompts[0], params)
        else:
            _check_each(llm, prompts, params)
            with profiled(llm, args):
                completions = llm.generate(prompts, params, progress=sys.stderr.isatty())
            output.writelines(_line(text, each) + "\n" for text, each in zip(texts, completions, strict=True))
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    if (args.prompt is None) == (args.prompts is None):
        raise BadRequest("Give a prompt, or a file of prompts with --prompts FILE: one of the two.")
    if args.prompts is None:
        return [read_text(Path("-"))] if args.prompt == "-" else [args.prompt]
    texts = [line for _, line in read_lines(args.prompts)]
    if not texts:
        raise BadRequest(f"{args.prompts} holds no prompts. Write one per line.")
    return texts


def _chat_prompt(llm: LLM, text: str, params: SamplingParams) -> Prompt:
    return llm.chat_prompt([{"role": "user", "content": text}], reasoning=params.structured is None)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
        if delta.finish_reason == "error":
            raise SequenceFailed.of_choice(delta.error)
    print()


def _check_each(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Refuses a file with an invalid prompt before anything is generated, and says which."""
    for number, prompt in enumerate(prompts, 1):
        try:
            llm.prepare(prompt, params)
        except BadRequest as error:
            raise BadRequest(f"Prompt {number}: {error}", param=error.param) from error


def _line(text: str, completion: Completion) -> str:
    prompt, generated = len(completion.prompt_ids), completion.num_generated
    choices = [
        {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason}
        | ({"error": choice.error} if choice.error else {})
        for choice in completion.choices
    ]
    usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
    return json.dumps({"prompt": text, "choices": choices, "usage": usage}, ensure_ascii=False)

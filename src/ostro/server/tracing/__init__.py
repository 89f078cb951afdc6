"""Requests as OpenTelemetry spans, sent to a collector by a thread of its own.

    POST /v1/chat/completions   ├────────────────────────────────────────┤
      queue                         ├───────┤                                 in line, before the engine and in it
      prefill                               ├─────────┤                       from its first step to its first token
      decode                                          ├────────────────┤      to its last token

Spans are made when a request is over, from the times in its record, as metrics are: nothing is done for a token. Of
several prompts or choices, queue ends when the first of them runs, prefill with the first token of any, decode with the
last of all.

spans     what a record tells, by OpenTelemetry's conventions; knows no library
tracer    the spans themselves, and the thread that sends them; the one module that imports opentelemetry
start     whether requests are traced, and where their spans go; imports `tracer` only if they are
"""

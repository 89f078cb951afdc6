"""Requests as OpenTelemetry spans, sent to a collector by a background thread.

    POST /v1/chat/completions   ├────────────────────────────────────────┤
      queue                         ├───────┤                                 waiting for admission, then in the engine
      prefill                               ├─────────┤                       from its first step to its first token
      decode                                          ├────────────────┤      to its last token

Spans are created when a request is over, from the times in its record, like metrics: there is no work per token. With
several prompts or choices, queue ends when the first of them runs, prefill with the first token of any, decode with the
last token of all.

spans     a record's spans under OpenTelemetry's conventions; imports no library
tracer    creates and sends spans; the only module that imports opentelemetry
start     whether requests are traced, and where their spans go; imports `tracer` only if they are
"""

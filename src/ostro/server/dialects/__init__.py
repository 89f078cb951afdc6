"""The APIs that clients speak: one folder each, with what they share beside them.

registry    which dialects there are; a dialect is a folder and one line there
dialect     what every dialect says about itself: its path, its errors, the ends of its streams

NAME/framing    its `DIALECT`: what it says about itself
NAME/request    what clients send, translated into the inner chat request or the engine's
NAME/writer     what they get, as events or as a whole
NAME/routes     its `router`: the endpoints
"""

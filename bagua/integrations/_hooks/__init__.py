"""What a communication hook of torch's DDP remembers from step to step."""

from bagua.integrations._hooks.state import HookState

__all__ = ["HookState"]

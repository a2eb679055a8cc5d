"""Whether a session from elsewhere means the same on this server. Pure."""

from holdfast.errors import SessionFileRefused
from holdfast.sessions.portable.content import PortableSession
from holdfast.sessions.ports import ModelInfo


def check_fit(session: PortableSession, model: ModelInfo) -> None:
    """Raises SessionFileRefused where its tokens would mean something else here, or cannot be kept as they were.

    Other weights with the same tokenizer are fine: the tokens stay, the cache is computed again.
    """
    theirs = session.model
    is_same = theirs.fingerprint == model.fingerprint
    if not is_same and not (theirs.tokenizer_hash and theirs.tokenizer_hash == model.tokenizer_hash):
        raise SessionFileRefused(
            f"the session was made with {_named(theirs.name)} and another tokenizer than that of "
            f"{_named(model.name)}: its tokens would mean something else here",
            reason="other_model",
        )
    if session.opened.kind == "chat" and theirs.chat_template_hash != model.chat_template_hash:
        raise SessionFileRefused(
            f"the chat was rendered with another template than that of {_named(model.name)}: "
            "it could not go on as it began",
            reason="other_template",
        )
    _check_vocabulary(session, model)
    sink = max(session.opened.sink, session.opened.pin_tokens or 0)
    if sink > model.max_pin:
        raise SessionFileRefused(
            f"the session pins its first {sink} tokens, this server allows {model.max_pin}; raise --max-pin",
            reason="too_many_pins",
        )


def _check_vocabulary(session: PortableSession, model: ModelInfo) -> None:
    for name, tokens in (("history", session.all_tokens()), ("eos_token_ids", session.opened.eos_token_ids)):
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise SessionFileRefused(
                    f"the session's {name} has token {token}, outside the vocabulary of {model.vocab_size}",
                    reason="out_of_vocabulary",
                )


def _named(name: str) -> str:
    return repr(name[:100])

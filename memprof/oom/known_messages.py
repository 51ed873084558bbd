"""Load every known wording from the knowledge files, specific ones before general ones."""

from __future__ import annotations

from msgspec.structs import replace

from memprof.oom.knowledge_files import MESSAGE_FILES, Cause, answers, typed
from memprof.oom.message_form import Form


def _forms(name: str) -> tuple[Form, ...]:
    killed = "|".join(typed("host", "killed", tuple[str, ...]))
    rows = typed(name, "message", tuple[Form, ...])
    return tuple(replace(row, words=row.words.replace("{killed}", killed)) for row in rows)


#: Where two match the same words the earlier one is taken.
FORMS: tuple[Form, ...] = tuple(row for name in MESSAGE_FILES for row in _forms(name))
#: Read field by field, see :mod:`memprof.oom.reading.fields`.
DEVICE_FORMS = _forms("torch")
NOT_MEMORY = _forms("elsewhere")
#: A region of a long log is read closely where one of these stands, in lower case.
TRIGGERS: tuple[str, ...] = tuple(
    word for name in (*MESSAGE_FILES, "torch", "elsewhere") for word in typed(name, "triggers", tuple[str, ...])
)


def answer_of(row: Form) -> Cause:
    """Return a form's own answer, else its event's.

    Raises:
        LookupError: it has no answer.
    """
    for key in (row.id, row.event):
        if (found := answers().get(key)) is not None:
            shared = answers()[found.same_as] if found.same_as else found
            return replace(shared, **{name: own for name in ("because", "tries") if (own := getattr(found, name))})
    raise LookupError(f"no answer for {row.id}")

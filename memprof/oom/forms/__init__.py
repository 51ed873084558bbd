"""Every wording that is known, the specific ones before the general ones."""

from memprof.oom.form import Form
from memprof.oom.forms import accelerators, engines, host, libraries, not_memory, torch_allocator

__all__ = ["DEVICE_FORMS", "FORMS", "NOT_MEMORY"]

# Where two match the same words the earlier one is taken.
FORMS: tuple[Form, ...] = (*engines.FORMS, *libraries.FORMS, *accelerators.FORMS, *host.FORMS, *host.WEAK_FORMS)
# Read field by field, see memprof.oom.fields.
DEVICE_FORMS: tuple[Form, ...] = torch_allocator.FORMS
NOT_MEMORY: tuple[Form, ...] = not_memory.FORMS

"""machine.json, which `mule probe` wrote on some box, back into a Machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from muletrain.spec.errors import InputError
from muletrain.spec.machine import Machine


def load_machine(path: Path) -> Machine:
    """Raises InputError that names the file, each field at fault, and the fix."""
    try:
        return Machine.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"{path}: cannot be read ({reason}); `mule probe --out {path}` on the box writes it") from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()]
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise InputError(
            f"{path}: not what `mule probe` of this version writes ({shown}); run `mule probe --out {path}` on the box again"
        ) from None

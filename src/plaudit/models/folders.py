"""Turn what a setting names into a folder: a path, a run (its best or newest model), a GGUF file, or a hub id."""

from __future__ import annotations

from pathlib import Path

from plaudit.models.files import read_json
from plaudit.support.address import is_address, local_copy
from plaudit.support.errors import best_checkpoint
from plaudit.support.fields import close
from plaudit.support.paths import at_home, is_here
from plaudit.support.rooms import optional

HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
GGUF_NOTES = "GGUF.json"
"""The file of a folder that was made of a GGUF file which says of which: its name, types of weights, licence."""


def local_folder(path: str) -> Path:
    """Return a model's folder: `path` itself, the best or newest model of the run at `path`, the folder made of a GGUF
    file, or the local copy of an address or hub id, downloaded unless cached. Raises FileNotFoundError if there is
    none."""
    if is_address(path):
        return local_copy(path)
    folder = at_home(path)
    if folder.is_dir():
        return _model_of_run(folder) if _is_run(folder) else folder
    if is_here(path):
        made: Path = optional("interchange", asked_by=f"the model {path}").folder_of(folder)
        return made
    refuse_absent(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"{path!r} is neither a folder nor a model that the Hugging Face hub gave ({type(error).__name__}). "
            "Check the spelling; without a network, download it elsewhere and give its folder."
        ) from error


def whole_path(path: str | None) -> str | None:
    """Return a local model's folder as an absolute path, for other processes; hub ids, addresses, None unchanged."""
    return str(local_folder(path).resolve()) if path is not None and is_here(path) else path


def rounding(folder: Path) -> list[str]:
    """Return a list with a note if the folder's weights come from a GGUF file with quantised weights; else []."""
    notes = folder / GGUF_NOTES
    types = read_json(notes).get("quantised") if notes.exists() else None
    if not types:
        return []
    return [
        (
            f"the weights were quantised ({', '.join(types)}): they carry its rounding, and are a little worse than "
            "those that were published"
        )
    ]


def refuse_absent(path: str, output: str = "runs") -> None:
    """Raise FileNotFoundError if an absent path cannot be a hub id, as it begins with ".", "/", "~" or `output` or has
    more than one slash, or if it has one and its parent folder exists here."""
    parent = at_home(path).parent
    local = path.startswith((".", "/", "~", f"{output.rstrip('/')}/")) or path.count("/") > 1
    if local or ("/" in path and parent.is_dir()):
        names = [one.name for one in parent.glob("*/")] if parent.is_dir() else []
        near = close(at_home(path).name, names, f"{parent}/")
        more = near or ". Give the folder of a saved model or of a run, or a hub id (owner/name)"
        raise FileNotFoundError(f"there is no folder {path}{more}")


def run_of(path: str) -> Path | None:
    """Return the folder of a model's run, if `path` is a run or a checkpoint of one; None for other models."""
    folder = at_home(path).absolute()
    if not folder.is_dir():
        return None
    of_checkpoint = len(folder.parents) > 2 and folder.parents[1].name == "checkpoints"
    return folder.parents[2] if of_checkpoint else folder if _is_run(folder) else None


def _is_run(folder: Path) -> bool:
    """True for a run's folder. A run that ended before its first checkpoint has only a log."""
    logs = (folder / "log.txt").is_file() and not any(folder.glob("*config.json"))
    return logs or (folder / "checkpoints").is_dir()


def _model_of_run(run: Path) -> Path:
    """Return the policy's (or judge's) folder in the run's best committed checkpoint, if evaluated, else its newest."""
    states = (run / "checkpoints" / "state").glob("epoch*globalstep*")
    found = sorted(states, key=lambda path: int(path.name.rpartition("globalstep")[2]))
    for name in (best_checkpoint(found[-1]), found[-1].name) if found else ():
        for role in ("policy", "judge"):
            if name is not None and (run / "checkpoints" / role / name).is_dir():
                return run / "checkpoints" / role / name
    raise FileNotFoundError(f"The run {run} has no checkpoint yet. Let it reach one, or give another model.")


def config_file(path: str) -> Path:
    """Return the path of a folder's or run's config.json, or of a hub id's, downloading only this file."""
    if is_here(path) or path.startswith((".", "/", "~")) or path.count("/") != 1:
        return local_folder(path) / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, "config.json"))
    except Exception as error:  # its errors have no common class
        raise FileNotFoundError(
            f"{path!r} is neither a folder nor a model that the Hugging Face hub gave ({type(error).__name__}). Give "
            "the folder of its config.json, or model.path=null and its keys as model.config."
        ) from error

"""The source `hf`: a model repository of the Hugging Face hub.

`hf:ORG/NAME`, optionally `@REVISION`; `ORG/NAME` alone means it too where no such path exists. The package
`huggingface_hub` downloads: it resumes, takes the token from the user's environment, and answers from its cache when
the hub cannot be reached.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from headrace.core.errors import CheckpointError
from headrace.core.interfaces.checkpoint import Progress
from headrace.models.sources.cache import cache_folder

__all__ = ["HUB_NAME", "HubSource"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w./-]+)?")

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
"""What is fetched: never pickled weights or code."""

OTHERS = ("*/*.safetensors", "consolidated*.safetensors")
"""What is not, though it looks so: the same weights once more, in another layout."""


class HubSource:
    """Repositories of the hub; see `headrace.core.interfaces.ModelSource`."""

    name = "hf"

    def resolve(self, reference: str, progress: Progress | None = None) -> Path:
        """Return the folder of a snapshot, downloading what is not there.

        Raises `CheckpointError` with what to do.
        """
        if HUB_NAME.fullmatch(reference) is None:
            raise CheckpointError(
                f"'hf:{reference}' is not of the form hf:ORG/NAME, optionally with @REVISION"
            )
        try:
            from huggingface_hub import errors, snapshot_download
        except ImportError:
            raise CheckpointError(
                f"'hf:{reference}' needs the package huggingface_hub: pip install huggingface_hub"
            ) from None
        # Its HTTP client's errors, too, which it lets through; which client that is differs by version.
        failures = tuple(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
        repository, _, revision = reference.partition("@")
        try:
            folder = snapshot_download(
                repository,
                revision=revision or None,
                cache_dir=cache_folder() / "hub",
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(OTHERS),
            )
        except errors.GatedRepoError as error:
            raise CheckpointError(
                f"the hub keeps {repository!r} behind terms: accept them on its page, then set HF_TOKEN to a "
                f"token of yours that may read it ({_first_line(error)})"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise CheckpointError(f"the hub's {repository!r} has no revision {revision!r}") from error
        except errors.RepositoryNotFoundError as error:
            raise CheckpointError(
                f"the hub has no model {repository!r}, or it is private, and no file or folder here is "
                "called so: look for a slip in the name, or set HF_TOKEN to a token of yours that may read it"
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise CheckpointError(
                f"the hub cannot be reached, and {repository!r} is not in the cache folder {cache_folder()} "
                f"({_first_line(error)})"
            ) from error
        except failures as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(
                    f"no room left in {cache_folder()} for {repository!r}: free some, or set HEADRACE_CACHE to a "
                    "folder that can be written and has room"
                ) from error
            raise CheckpointError(
                f"{repository!r} could not be fetched from the hub into {cache_folder()}: {_first_line(error)}. What "
                "is there is kept: the same command goes on from it"
            ) from error
        return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

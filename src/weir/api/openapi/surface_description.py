"""What each surface adds to the document: its paths, its schemas, and which parser's fields those schemas are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.api.openapi.json_schema import Json


@dataclass(frozen=True)
class SurfaceDescription:
    """One surface's part. name: its tag. page: its page, below docs/reference.

    paths: path → method → operation. schemas: its own components. parsed: the component of each object that its parser reads →
    the fields that the parser knows; a test holds both to be the same.
    """

    name: str
    description: str
    page: str
    paths: Mapping[str, Mapping[str, Json]]
    schemas: Mapping[str, Json] = field(default_factory=dict)
    parsed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

"""A gateway's request for a grant, as admission sees it."""

from weir.core.admission import Asked
from weir.core.tenancy import Principal
from weir.messages import Acquire


def question_of(acquire: Acquire, *, is_quarantined: bool) -> Asked:
    """What admission is asked about it."""
    principal = Principal(acquire.tenant, acquire.application, acquire.key, acquire.service_class)
    return Asked(
        principal=principal,
        alias=acquire.alias,
        revision=acquire.revision,
        body_digest=acquire.body_digest,
        input_tokens=acquire.input_tokens,
        input_bytes=acquire.input_bytes,
        max_output_tokens=acquire.max_output_tokens,
        choices=acquire.choices,
        deadline_ms=acquire.deadline_left_ms,
        is_quarantined=is_quarantined,
    )

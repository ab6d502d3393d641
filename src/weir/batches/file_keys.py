"""Where files and batches lie in the store: every key, in one place.

<tenant>/files/<file>.json    its record            <tenant>/files/<file>.data       its content
<tenant>/batches/<batch>.json as asked for          <tenant>/batches/<batch>.cancel  that it was given up
                /<batch>.progress                   <tenant>/batches/<batch>.end     how it ended, once
                /<key>.order                        which batch an idempotency key stands for
<tenant>/<batch>/<number>.<worker>                  what its lines became, in groups
                /counted                            the groups that count, once its result files are written
_open/batches/<batch>                               names the tenant; there until it has ended
"""

OPEN_FOLDER = "_open/batches"


def files_folder(tenant: str) -> str:
    """All files of a tenant, two keys each."""
    return f"{tenant}/files"


def file_record(tenant: str, file_id: str) -> str:
    """A file is there once its record is."""
    return f"{tenant}/files/{file_id}.json"


def file_content(tenant: str, file_id: str) -> str:
    """Written before its record."""
    return f"{tenant}/files/{file_id}.data"


def batches_folder(tenant: str) -> str:
    """All batches of a tenant, up to five keys each."""
    return f"{tenant}/batches"


def batch_record(tenant: str, batch_id: str) -> str:
    """As it was asked for."""
    return f"{tenant}/batches/{batch_id}.json"


def batch_progress(tenant: str, batch_id: str) -> str:
    """How far it is."""
    return f"{tenant}/batches/{batch_id}.progress"


def batch_cancel(tenant: str, batch_id: str) -> str:
    """That it was given up."""
    return f"{tenant}/batches/{batch_id}.cancel"


def batch_end(tenant: str, batch_id: str) -> str:
    """How it ended."""
    return f"{tenant}/batches/{batch_id}.end"


def batch_order(tenant: str, name: str) -> str:
    """Of an idempotency key: written before anything of its batch, and deleted before it."""
    return f"{tenant}/batches/{name}.order"


def groups_folder(tenant: str, batch_id: str) -> str:
    """What its lines became."""
    return f"{tenant}/{batch_id}"


def counted_groups(tenant: str, batch_id: str) -> str:
    """Which of the groups count, written once; behind all of them in their folder, and deleted with it."""
    return f"{tenant}/{batch_id}/counted"


def open_batch(batch_id: str) -> str:
    """Written before the batch's record, deleted after its end."""
    return f"{OPEN_FOLDER}/{batch_id}"

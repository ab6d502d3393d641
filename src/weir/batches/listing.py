"""A folder of the store as one listing, in large pages: a bucket reads all of it for each."""

from collections.abc import AsyncGenerator

from weir.kept_files import FileStore, StoredFile

_PAGE = 10_000


async def stored_in(store: FileStore, folder: str) -> AsyncGenerator[StoredFile, None]:
    """All files of a folder, by key. Raises FileStoreUnavailable."""
    page = await store.files(folder, "", _PAGE)
    while page:
        for each in page:
            yield each
        page = await store.files(folder, page[-1].key, _PAGE) if len(page) == _PAGE else ()

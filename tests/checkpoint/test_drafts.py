"""Files that are whole or not there, however many write them at once."""

import threading

from dynajax.checkpoint.drafts import draft_file


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    """Each has a draft of its own: with a common one the second to finish finds it gone."""
    path, ready, failures = tmp_path / "file", threading.Barrier(2), []

    def write(text: bytes) -> None:
        try:
            with draft_file(path, len(text)) as file:
                file.write(text)
                ready.wait(timeout=30)  # both drafts are open
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,), name=text.decode()) for text in (b"first", b"second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and path.read_bytes() in (b"first", b"second")
    assert list(tmp_path.iterdir()) == [path]

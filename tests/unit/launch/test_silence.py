"""Who counts as silent, who hangs, and who still loads, counted in looks."""

from launch.silence import LOADING_LOOKS, SILENT_LOOKS, Loading, Silence


def looks(silence: Silence, num: int) -> list[tuple[list[str], list[str]]]:
    return [silence.look() for _ in range(num)]


def test_a_process_that_gives_signs_of_life_is_never_silent():
    silence = Silence(hang_looks=20)
    for _ in range(50):
        assert not silence.heard("target")
        assert looks(silence, SILENT_LOOKS - 1) == [([], [])] * (SILENT_LOOKS - 1)


def test_silence_is_told_once_and_a_hang_at_every_look_until_the_watch_ends():
    silence = Silence(hang_looks=SILENT_LOOKS + 3)
    silence.heard("target")
    found = looks(silence, SILENT_LOOKS + 4)
    assert [number for number, (silent, _) in enumerate(found, 1) if silent == ["target"]] == [SILENT_LOOKS]
    assert [bool(hanging) for _, hanging in found[-3:]] == [False, True, True]
    silence.end("target")
    assert looks(silence, 30) == [([], [])] * 30


def test_a_sign_of_life_after_silence_is_news_and_starts_the_count_anew():
    silence = Silence(hang_looks=SILENT_LOOKS + 1)
    silence.heard("draft")
    looks(silence, SILENT_LOOKS)
    assert silence.heard("draft")
    assert not silence.heard("draft")
    assert looks(silence, SILENT_LOOKS - 1) == [([], [])] * (SILENT_LOOKS - 1)


def test_with_a_timeout_of_0_nobody_ever_hangs():
    silence = Silence(hang_looks=0)
    silence.heard("memsvc")
    assert not any(hanging for _, hanging in looks(silence, 10_000))


def test_a_process_that_is_not_ready_is_not_watched():
    assert looks(Silence(hang_looks=1), 30) == [([], [])] * 30


def test_a_process_that_loads_is_told_of_now_and_then_until_it_is_ready():
    loading = Loading()
    loading.begin("target")
    told = [loading.look() for _ in range(2 * LOADING_LOOKS + 1)]
    assert [found for found in told if found] == [[("target", LOADING_LOOKS)], [("target", 2 * LOADING_LOOKS)]]
    loading.end("target")
    assert not any(loading.look() for _ in range(2 * LOADING_LOOKS))

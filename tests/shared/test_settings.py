"""Settings from the environment: typed, and all faults at once."""

from __future__ import annotations

import dataclasses

import pytest

from shared.settings import SettingsError, describe, from_environment, setting

PREFIX = "READYMARK_TEST_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    database_url: str = setting(secret=True)
    embedder_address: str = setting("127.0.0.1:1", env="READYMARK_EMBEDDER_ADDRESS")
    lease_seconds: float = 60.0
    max_attempts: int = 3
    is_traced: bool = False
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"{PREFIX}MAX_ATTEMPTS must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sister:
    listen: str = "127.0.0.1:0"


def read(**environment: str) -> Settings:
    complete = {f"{PREFIX}DATABASE_URL": "postgresql://u:pw@h/d"} | environment
    return from_environment(Settings, PREFIX, complete)


def faults(environment: dict[str, str], **options: type) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        from_environment(Settings, PREFIX, environment, **options)
    return str(caught.value).splitlines()


def test_what_is_not_set_keeps_its_default():
    assert read() == Settings(database_url="postgresql://u:pw@h/d")
    assert read(READYMARK_TEST_LEASE_SECONDS="").lease_seconds == 60.0


def test_each_field_is_read_in_its_type():
    found = read(
        READYMARK_TEST_LEASE_SECONDS="2.5",
        READYMARK_TEST_MAX_ATTEMPTS="7",
        READYMARK_TEST_IS_TRACED="Yes",
        READYMARK_TEST_FOLDER="/data",
        READYMARK_EMBEDDER_ADDRESS="embedder:7402",
    )
    assert (found.lease_seconds, found.max_attempts, found.is_traced) == (2.5, 7, True)
    assert (found.folder, found.embedder_address) == ("/data", "embedder:7402")


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("off", False), ("FALSE", False), ("on", True), (" true ", True)]
)
def test_truth_has_several_spellings(text, value):
    assert read(READYMARK_TEST_IS_TRACED=text).is_traced is value


def test_all_faults_are_told_at_once():
    found = faults(
        {
            f"{PREFIX}LEASE_SECONDS": "soon",
            f"{PREFIX}MAX_ATTEMPTS": "2.5",
            f"{PREFIX}IS_TRACED": "maybe",
            f"{PREFIX}LAESE_SECONDS": "1",
        }
    )
    assert len(found) == 5
    for name in ("DATABASE_URL", "LEASE_SECONDS", "MAX_ATTEMPTS", "IS_TRACED", "LAESE_SECONDS"):
        assert any(line.startswith(f"{PREFIX}{name}") for line in found), name


def test_a_setting_that_contradicts_itself_is_a_fault_like_any_other():
    environment = {f"{PREFIX}DATABASE_URL": "x", f"{PREFIX}MAX_ATTEMPTS": "0"}
    assert faults(environment) == [f"{PREFIX}MAX_ATTEMPTS must be at least 1"]


def test_a_variable_of_the_sister_process_is_no_typing_error():
    environment = {f"{PREFIX}DATABASE_URL": "x", f"{PREFIX}LISTEN": "127.0.0.1:7"}
    assert faults(environment) == [f"{PREFIX}LISTEN is not a setting of this service"]
    assert from_environment(Settings, PREFIX, environment, also_known=Sister).database_url == "x"


def test_other_variables_and_the_addresses_that_clients_use_are_left_alone():
    environment = {f"{PREFIX}DATABASE_URL": "x", "HOME": "/", "READYMARK_OTHER_X": "1"}
    assert from_environment(Settings, PREFIX, environment).database_url == "x"

    @dataclasses.dataclass(frozen=True)
    class Ingest:
        pass

    assert from_environment(Ingest, "READYMARK_INGEST_", {"READYMARK_INGEST_ADDRESS": "h:1"}) == Ingest()


def test_a_secret_is_never_described():
    described = describe(read())
    assert described["database_url"] == "***"
    assert "pw" not in str(described)
    assert described["max_attempts"] == 3

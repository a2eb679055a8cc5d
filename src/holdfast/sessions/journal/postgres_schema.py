"""The journal's tables in PostgreSQL: created once, migrated step by step, and checked when they are opened. Blocks."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psycopg

from holdfast.errors import ConfigError
from holdfast.sessions.journal.postgres_connection import LEAST_VERSION, one_line
from holdfast.sessions.journal.postgres_pipeline import Connection

logger = logging.getLogger(__name__)

_LOCK = 0x686F6C64  # an advisory lock: one server at a time creates or migrates
_TABLES = ("sessions", "spans", "bodies", "turns", "members", "leases")


@dataclass(frozen=True, slots=True)
class Migration:
    """From one version to the next. One that was released never changes.

    `is_online`: servers of the version before go on working with what it makes, so a server may run it at its start.
    """

    statements: tuple[str, ...]
    is_online: bool = False


# Columns are those of SQLite, in its order. There are no foreign keys: each commit checks that its sessions are there,
# and purging locks what it deletes.
MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        (
            """CREATE TABLE sessions (
                id TEXT COLLATE "C" PRIMARY KEY, number BIGINT NOT NULL, owner TEXT COLLATE "C" NOT NULL,
                kind TEXT NOT NULL, label TEXT NOT NULL, group_name TEXT NOT NULL, metadata TEXT NOT NULL,
                pin_tokens BIGINT, eos_token_ids TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, forked_from TEXT,
                checksum BIGINT NOT NULL, sink BIGINT NOT NULL, reward DOUBLE PRECISION, closed_why TEXT,
                closed_at DOUBLE PRECISION, summary BYTEA, rested_at DOUBLE PRECISION, name TEXT COLLATE "C",
                member TEXT COLLATE "C"
            )""",
            """CREATE TABLE spans (
                step BIGINT PRIMARY KEY, session TEXT COLLATE "C" NOT NULL, kind TEXT NOT NULL, length BIGINT NOT NULL,
                tokens BYTEA NOT NULL, logprobs BYTEA NOT NULL, sampling_logprobs BYTEA NOT NULL, stop_reason TEXT,
                checksum BIGINT NOT NULL
            )""",
            "CREATE INDEX spans_of_session ON spans (session, step)",
            """CREATE TABLE bodies (
                id BIGINT PRIMARY KEY, segment TEXT COLLATE "C", start BIGINT, length BIGINT NOT NULL,
                checksum BIGINT NOT NULL, content BYTEA
            )""",
            """CREATE TABLE turns (
                session TEXT COLLATE "C" NOT NULL, number BIGINT NOT NULL, parent BIGINT NOT NULL,
                messages BYTEA NOT NULL, reply BYTEA NOT NULL, root BYTEA NOT NULL, given BYTEA NOT NULL,
                sampled BYTEA NOT NULL, logprobs BYTEA NOT NULL, sampling_logprobs BYTEA NOT NULL,
                finish_reason TEXT NOT NULL, facts BYTEA NOT NULL, ticket_key TEXT NOT NULL, body_hash BYTEA NOT NULL,
                num_control BIGINT NOT NULL, step BIGINT NOT NULL, request BIGINT NOT NULL, response BIGINT NOT NULL,
                checksum BIGINT NOT NULL, reward DOUBLE PRECISION, is_delivered BIGINT NOT NULL,
                PRIMARY KEY (session, number)
            ) WITH (fillfactor = 90)""",
            "CREATE INDEX turns_by_request ON turns (request)",
            "CREATE INDEX turns_by_response ON turns (response)",
            "CREATE INDEX sessions_closed ON sessions (closed_at) WHERE closed_at IS NOT NULL",
            "CREATE UNIQUE INDEX sessions_by_name ON sessions (owner, name)"
            " WHERE name IS NOT NULL AND closed_at IS NULL",
            "CREATE INDEX sessions_by_number ON sessions (number)",
            "CREATE INDEX sessions_of_owner ON sessions (owner, number) WHERE closed_at IS NULL",
            "CREATE INDEX sessions_rested ON sessions (coalesce(rested_at, created_at)) WHERE closed_at IS NULL",
            "CREATE INDEX sessions_of_member ON sessions (member) WHERE member IS NOT NULL",
            # `state` decides who may write: serving, left or dead. What a member tells of itself is with its lease,
            # which is renewed while commits hold a lock on the member.
            """CREATE TABLE members (
                name TEXT COLLATE "C" PRIMARY KEY, epoch BIGINT NOT NULL, state TEXT NOT NULL, http TEXT NOT NULL,
                grpc TEXT NOT NULL, has_tls BOOLEAN NOT NULL, version TEXT NOT NULL, joined_at DOUBLE PRECISION NOT NULL
            )""",
            """CREATE TABLE leases (
                name TEXT COLLATE "C" PRIMARY KEY, until TIMESTAMPTZ NOT NULL, is_draining BOOLEAN NOT NULL,
                room BIGINT NOT NULL, num_sessions BIGINT NOT NULL
            ) WITH (fillfactor = 50)""",
            "CREATE SEQUENCE steps",
            "CREATE SEQUENCE numbers",
            "CREATE SEQUENCE epochs",
        ),
        is_online=True,
    ),
)


def prepare(
    connection: Connection, place: str, *, may_stop: bool = False, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Create the tables, or migrate them as far as that needs no other server to stop; with `may_stop` all the way.

    Raises ConfigError, with what to do, where the database cannot be used. Several servers may call this at once.
    """
    if connection.info.server_version < LEAST_VERSION * 10_000:
        raise ConfigError(
            f"the database {place} is PostgreSQL {connection.info.server_version // 10_000}; "
            f"use PostgreSQL {LEAST_VERSION} or newer"
        )
    [about] = connection.execute(
        "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS is_read_only,"
        " current_setting('server_encoding') AS encoding"
    )
    if about["is_read_only"]:
        raise ConfigError(f"the database {place} is read-only; name the primary server in the URL, not a replica")
    if about["encoding"] != "UTF8":
        raise ConfigError(f"the database {place} has the encoding {about['encoding']}; create it with ENCODING 'UTF8'")
    try:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock($1)", [_LOCK])
            _migrate(connection, place, may_stop, migrations)
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ConfigError(
            f"no permission in the database {place}: {one_line(exc)}; let its user own the database "
            "(ALTER DATABASE ... OWNER TO ...), or grant it what is missing"
        ) from exc
    except psycopg.Error as exc:
        raise ConfigError(f"cannot use the database {place}: {one_line(exc)}") from exc


def _migrate(connection: Connection, place: str, may_stop: bool, migrations: Sequence[Migration]) -> None:
    version = _version(connection, place)
    if version > len(migrations):
        raise ConfigError(
            f"the journal in {place} has version {version}, and this Holdfast supports up to {len(migrations)}; "
            "use the newer Holdfast that wrote it, or another database"
        )
    if version and not may_stop and not all(migration.is_online for migration in migrations[version:]):
        raise ConfigError(
            f"the journal in {place} has version {version}, and this Holdfast needs {len(migrations)}; "
            "stop all servers that use it, then run: holdfast journal migrate"
        )
    if version and may_stop and version < len(migrations):
        alive = connection.execute("SELECT name FROM leases WHERE until > clock_timestamp() ORDER BY name").fetchall()
        if alive:
            raise ConfigError(
                f"{alive[0]['name']} uses the journal in {place}; stop all servers that do, then try again"
            )
    for statement in (statement for migration in migrations[version:] for statement in migration.statements):
        connection.execute(statement.encode())
    if version < len(migrations):
        connection.execute(
            "INSERT INTO facts VALUES ('version', $1) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            [str(len(migrations))],
        )
        logger.info("the journal in %s has version %d now", place, len(migrations))
    # Numbers that another journal gave out may have been copied here.
    connection.execute(
        "SELECT setval('numbers', highest) FROM numbers, (SELECT max(number) AS highest FROM sessions) AS given"
        " WHERE highest > last_value"
    )


def _version(connection: Connection, place: str) -> int:
    """0: there is nothing yet."""
    [found] = connection.execute("SELECT to_regclass('facts') IS NOT NULL AS has_facts")
    if found["has_facts"]:
        try:
            with connection.transaction():
                rows = connection.execute("SELECT value FROM facts WHERE name = 'version'").fetchall()
            return int(rows[0]["value"])
        except (psycopg.errors.UndefinedColumn, IndexError, ValueError) as exc:
            raise _not_ours(place, "facts") from exc
    taken = connection.execute(
        "SELECT name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NOT NULL", [list(_TABLES)]
    )
    for row in taken.fetchall():
        raise _not_ours(place, row["name"])
    connection.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
    return 0


def _not_ours(place: str, table: str) -> ConfigError:
    return ConfigError(
        f"the database {place} has a table {table!r} that Holdfast did not make; create a database for Holdfast alone, "
        "or name another schema in the URL (?options=-csearch_path%3DSCHEMA)"
    )


def check_model(connection: Connection, place: str, model: Mapping[str, str]) -> None:
    """Note the `name` and `tokenizer_hash` of the model where none is noted. Raises ConfigError where the journal was
    used with another tokenizer: its tokens would say something else."""
    noted = noted_model(connection)
    if not noted:
        note_model(connection, model)
        noted = noted_model(connection)
    if noted["tokenizer_hash"] != model["tokenizer_hash"]:
        raise ConfigError(
            f"the database {place} was used with {noted['name']!r}, which has another tokenizer than "
            f"{model['name']!r}; use another database, or serve that model"
        )


def noted_model(connection: Connection) -> dict[str, str]:
    """The `name` and `tokenizer_hash` of the model that the journal was first used with; empty where none is noted."""
    rows = connection.execute("SELECT value FROM facts WHERE name = 'model'").fetchall()
    return dict(json.loads(rows[0]["value"])) if rows else {}


def note_model(connection: Connection, model: Mapping[str, str]) -> None:
    """Keeps what is noted already."""
    query = "INSERT INTO facts VALUES ('model', $1) ON CONFLICT (name) DO NOTHING"
    connection.execute(query, [json.dumps(dict(model))])

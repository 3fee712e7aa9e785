# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts: users, their roles, their shared keys and their counters."""

import hashlib
import secrets
from datetime import datetime
from enum import Enum
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    Uuid,
)
from sqlalchemy import Enum as SqlEnum
from sqlalchemy.orm import Mapped, mapped_column, relationship

from horde.clock import utcnow
from horde.db import Base
from horde.shapes.users import ANONYMOUS_KEY as ANONYMOUS_KEY

ANONYMOUS_ID = 0
ANONYMOUS_OAUTH_ID = "anon"
WIPED = "<wiped>"  # username and oauth_id of an account that was erased
MAX_USER_ID = 2**31 - 1
API_KEY_BYTES = 16  # 22 characters of URL-safe base64: the SDK refuses any other length

REGISTERED_FLOOR = 25  # a balance never stays below its floor
PSEUDONYMOUS_FLOOR = 14
ANONYMOUS_FLOOR = -50
EDUCATION_CONCURRENCY = 200
DEFAULT_CONCURRENCY = 30


class UserRoleTypes(Enum):
    """What an account was granted; the numbers are those of the stored enumeration's history."""

    MODERATOR = 0
    TRUSTED = 1
    FLAGGED = 3
    CUSTOMIZER = 4
    VPN = 5
    SPECIAL = 6
    SERVICE = 7
    EDUCATION = 8
    DELETED = 9


class UserRecordTypes(Enum):
    """Kinds of lifetime records."""

    CONTRIBUTION = 0
    USAGE = 1
    FULFILLMENT = 3
    REQUEST = 4
    STYLE = 5


class User(Base):
    """One account. `kudos` is what postings were folded into: only the applier writes it."""

    __tablename__ = "users"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    username: Mapped[str] = mapped_column(String(50))
    oauth_id: Mapped[str] = mapped_column(String(50))
    api_key: Mapped[str] = mapped_column(String(100), unique=True, index=True)
    client_id: Mapped[str] = mapped_column(
        String(50), unique=True, default=lambda: secrets.token_urlsafe(16)
    )
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    last_active: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    contact: Mapped[str | None] = mapped_column(String(500), index=True)
    admin_comment: Mapped[str | None] = mapped_column(Text)
    proxy_passkey: Mapped[str | None] = mapped_column(String(100))
    kudos: Mapped[int] = mapped_column(BigInteger, default=0)
    monthly_kudos: Mapped[int] = mapped_column(Integer, default=0)
    monthly_kudos_last_received: Mapped[datetime | None] = mapped_column(DateTime)
    evaluating_kudos: Mapped[int] = mapped_column(Integer, default=0)
    usage_multiplier: Mapped[float] = mapped_column(Float, default=1.0)
    worker_invited: Mapped[int] = mapped_column(Integer, default=0)
    public_workers: Mapped[bool] = mapped_column(Boolean, default=False)
    concurrency: Mapped[int] = mapped_column(Integer, default=DEFAULT_CONCURRENCY)

    roles: Mapped[list["UserRole"]] = relationship(
        lazy="raise", cascade="all, delete-orphan", passive_deletes=True
    )

    @property
    def alias(self) -> str:
        """The public name, `username#id`."""
        return f"{self.username}#{self.id}"


class UserRole(Base):
    """One granted role; revoking deletes the row."""

    __tablename__ = "user_roles"
    __table_args__ = (UniqueConstraint("user_id", "user_role", name="user_id_role"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    user_role: Mapped[UserRoleTypes] = mapped_column(SqlEnum(UserRoleTypes, name="userroletypes"))
    value: Mapped[bool] = mapped_column(Boolean, default=True)


class UserStats(Base):
    """A display total of a user: what was accumulated, gifted, donated, …"""

    __tablename__ = "user_stats"
    __table_args__ = (UniqueConstraint("user_id", "action", name="user_id_action"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    action: Mapped[str] = mapped_column(String(20), index=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


class UserRecords(Base):
    """A lifetime record of a user for one kind of work (`text`, `image`, `interrogation`)."""

    __tablename__ = "user_records"
    __table_args__ = (
        UniqueConstraint("user_id", "record_type", "record", name="user_id_record_type_record"),
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    record_type: Mapped[UserRecordTypes] = mapped_column(
        SqlEnum(UserRecordTypes, name="userrecordtypes")
    )
    record: Mapped[str] = mapped_column(String(30))
    value: Mapped[float] = mapped_column(Float, default=0.0)


class UserSharedKey(Base):
    """A key that lets its holder generate on the owner's account. `kudos` -1 is unlimited, 0 is
    empty.
    """

    __tablename__ = "user_sharedkeys"

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    kudos: Mapped[int] = mapped_column(BigInteger, default=5000)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    expiry: Mapped[datetime | None] = mapped_column(DateTime, index=True)
    name: Mapped[str | None] = mapped_column(String(255))
    utilized: Mapped[int] = mapped_column(BigInteger, default=0)
    max_image_pixels: Mapped[int] = mapped_column(Integer, default=-1)
    max_image_steps: Mapped[int] = mapped_column(Integer, default=-1)
    max_text_tokens: Mapped[int] = mapped_column(Integer, default=-1)


# Of the accounts that were erased there may be many, and all have the same identity.
Index(
    "ix_users_oauth_id_in_use",
    User.oauth_id,
    unique=True,
    postgresql_where=User.oauth_id != WIPED,
)
Index("ix_users_created_id", User.created, User.id)
Index(
    "ix_users_proxy_passkey", User.proxy_passkey, postgresql_where=User.proxy_passkey.is_not(None)
)


def generate_api_key() -> str:
    """A new key: 22 URL-safe characters."""
    return secrets.token_urlsafe(API_KEY_BYTES)


def hash_api_key(api_key: str, secret_key: str) -> str:
    """The stored form of a key: lower-case hex SHA-256 of salt and key."""
    return hashlib.sha256(secret_key.encode() + api_key.encode()).hexdigest()


def is_pseudonymous(oauth_id: str) -> bool:
    """Whether an account was made without an identity provider: its oauth_id is a bare UUID."""
    try:
        UUID(oauth_id)
    except ValueError:
        return False
    return True


def get_kudos_floor(user_id: int, oauth_id: str) -> int:
    """The balance below which an account's debt is forgiven."""
    if user_id == ANONYMOUS_ID:
        return ANONYMOUS_FLOOR
    return PSEUDONYMOUS_FLOOR if is_pseudonymous(oauth_id) else REGISTERED_FLOOR

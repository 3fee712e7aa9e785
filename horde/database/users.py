# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts: who a key belongs to, what the account may do, and how accounts are made and changed.

Source: docs/reference/accounts.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    ARRAY,
    Row,
    Select,
    Text,
    bindparam,
    case,
    cast,
    delete,
    exists,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from horde.chat_progress import build_lease_owner_key
from horde.classes.base.kudos import Account, Currency, EntryType, Movements, Statistic, StatTarget
from horde.classes.base.user import (
    ANONYMOUS_ID,
    DEFAULT_CONCURRENCY,
    EDUCATION_CONCURRENCY,
    MAX_USER_ID,
    WIPED,
    User,
    UserRole,
    UserRoleTypes,
    UserSharedKey,
    generate_api_key,
    get_kudos_floor,
    hash_api_key,
    is_pseudonymous,
)
from horde.classes.base.worker import Worker
from horde.classes.kobold.worker import TextWorker
from horde.config import Config
from horde.database import kudos
from horde.database.account_cache import AccountCache, publish_account_change
from horde.database.passkeys import forget_passkeys
from horde.database.workers import announce_owner_change, take_workers_offline
from horde.db import after_commit
from horde.exceptions import BadRequest, Forbidden
from horde.hot_session import keep
from horde.return_codes import ReturnCode
from horde.runtime import Part

_ROLES_WITHOUT_WORKERS = frozenset({UserRoleTypes.FLAGGED, UserRoleTypes.DELETED})
# They decide which requests the account's workers may serve.
_ROLES_OF_OWNERS = _ROLES_WITHOUT_WORKERS | {UserRoleTypes.TRUSTED, UserRoleTypes.MODERATOR}
# Kudos in one administrative change: far above any balance, far below what a column holds.


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A shared key as it was read: its remaining budget (-1 unlimited) and the limits of a job made
    with it.
    """

    id: UUID
    name: str | None
    kudos: int
    expiry: datetime | None
    max_text_tokens: int

    @property
    def is_empty(self) -> bool:
        """Whether the budget is used up."""
        return self.kudos == 0

    def is_expired(self, now: datetime) -> bool:
        """Whether it is past its time; a key without an expiry never is."""
        return self.expiry is not None and self.expiry < now

    def covers(self, amount: Decimal) -> bool:
        """Whether the budget is enough for `amount`."""
        return self.kudos == -1 or amount <= self.kudos


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The account that acts. `kudos` is what is shown, and may lag; spending asks the ledger.

    With a `sharedkey` the account is its owner, who pays.
    """

    id: int
    username: str
    oauth_id: str
    roles: frozenset[UserRoleTypes]
    concurrency: int
    kudos: int
    usage_multiplier: float
    worker_invited: int
    public_workers: bool
    created: datetime
    sharedkey: SharedKey | None = None

    @property
    def alias(self) -> str:
        """The public name, `username#id`."""
        return f"{self.username}#{self.id}"

    @property
    def floor(self) -> int:
        """The balance below which debt is forgiven."""
        return get_kudos_floor(self.id, self.oauth_id)

    @property
    def is_anonymous(self) -> bool:
        """Whether it is the account everybody shares."""
        return self.id == ANONYMOUS_ID

    @property
    def is_pseudonymous(self) -> bool:
        """Whether it was registered without an identity provider."""
        return is_pseudonymous(self.oauth_id)

    @property
    def is_patron(self) -> bool:
        """Whether the account supports the horde with money: none does, since no horde keeps such a
        list here.
        """
        return False

    @property
    def is_trusted(self) -> bool:
        """Whether rewards are paid straight to the balance."""
        return UserRoleTypes.TRUSTED in self.roles

    @property
    def is_moderator(self) -> bool:
        """Whether it administers users and workers."""
        return UserRoleTypes.MODERATOR in self.roles

    @property
    def is_flagged(self) -> bool:
        """Whether it is held back by a moderator."""
        return UserRoleTypes.FLAGGED in self.roles

    @property
    def is_deleted(self) -> bool:
        """Whether it is scheduled for deletion."""
        return UserRoleTypes.DELETED in self.roles

    @property
    def is_service(self) -> bool:
        """Whether it asks on behalf of others."""
        return UserRoleTypes.SERVICE in self.roles

    @property
    def is_education(self) -> bool:
        """Whether it belongs to a school."""
        return UserRoleTypes.EDUCATION in self.roles

    @property
    def is_customizer(self) -> bool:
        """Whether it may make styles without being trusted."""
        return UserRoleTypes.CUSTOMIZER in self.roles

    @property
    def is_vpn(self) -> bool:
        """Whether its workers may use an unsafe address."""
        return UserRoleTypes.VPN in self.roles


@dataclass(frozen=True, slots=True)
class NewAccount:
    """A new account and its key, which is shown once: only its hash is stored."""

    user: User
    api_key: str


@dataclass(slots=True)
class AccountState:
    """What `configure` set for this runtime."""

    secret_key: str | None = None
    admins: frozenset[str] = frozenset()


state = Part(AccountState)


callers: Part[AccountCache[Caller]] = Part(AccountCache)


def configure(config: Config) -> None:
    """Set what hashing a key and judging an account need; the ledger is configured with it. Forgets
    cached accounts.
    """
    state.set(AccountState(config.secret_key, frozenset(config.admins)))
    callers.get().clear()
    forget_passkeys()
    kudos.configure(config)


def get_account_generation() -> int:
    """Changes with every account that this process is told to read anew."""
    return callers.get().generation


def is_admin(caller: Caller) -> bool:
    """Whether an account is one of those the operator listed."""
    return not caller.is_anonymous and caller.alias in state.get().admins


# Who calls


def find_caller(session: Session, api_key: str | None) -> Caller | None:
    """The account a user key belongs to; None for an unknown or missing key.

    No statement while the process remembers the key, which is a few seconds and ends when the
    account changes, else one.
    """
    if not api_key:
        return None
    key_hash = _hash_key(api_key)
    if (known := callers.get().find(key_hash)) is not None:
        return known
    generation = callers.get().generation
    row = session.execute(_ACCOUNT_OF_KEY, {"key_hash": key_hash}).one_or_none()
    if row is None:
        return None
    caller = _build_caller(row)
    callers.get().put(key_hash, caller.id, caller, generation)
    return caller


def find_generate_caller(session: Session, api_key: str | None) -> Caller | None:
    """As `find_caller`, on the routes where a shared key is accepted too: the account is then its
    owner, `sharedkey` set.

    Shared keys are never remembered, so their budget is always read fresh. Whether the key may be
    used is the caller's.
    """
    if api_key and (sharedkey_id := parse_uuid(api_key)) is not None:
        shared = find_shared_key_caller(session, sharedkey_id)
        if shared is not None:
            return shared
    return find_caller(session, api_key)


def find_shared_key_caller(session: Session, sharedkey_id: UUID) -> Caller | None:
    """The owner of a shared key, `sharedkey` set; None when there is no such key. One statement."""
    facts = (
        UserSharedKey.id.label("sharedkey_id"),
        UserSharedKey.name.label("sharedkey_name"),
        UserSharedKey.kudos.label("sharedkey_kudos"),
        UserSharedKey.expiry.label("sharedkey_expiry"),
        UserSharedKey.max_text_tokens.label("sharedkey_max_text_tokens"),
    )
    row = session.execute(
        _select_accounts()
        .add_columns(*facts)
        .join(UserSharedKey, UserSharedKey.user_id == User.id)
        .where(UserSharedKey.id == sharedkey_id, User.oauth_id != WIPED)
    ).one_or_none()
    if row is None:
        return None
    sharedkey = SharedKey(
        id=row.sharedkey_id,
        name=row.sharedkey_name,
        kudos=row.sharedkey_kudos,
        expiry=row.sharedkey_expiry,
        max_text_tokens=row.sharedkey_max_text_tokens,
    )
    return replace(_build_caller(row), sharedkey=sharedkey)


def find_account(session: Session, user_id: int) -> Caller | None:
    """The facts of an account by id, read fresh; None for an unknown or wiped one."""
    row = session.execute(
        _select_accounts().where(User.id == user_id, User.oauth_id != WIPED)
    ).one_or_none()
    return None if row is None else _build_caller(row)


def list_accounts(session: Session, *, role: UserRoleTypes | None, limit: int) -> list[Caller]:
    """The newest accounts, wiped ones left out; with a role those that have it alone."""
    statement = _select_accounts().where(User.oauth_id != WIPED).order_by(User.id.desc())
    if role is not None:
        has_role = exists().where(
            UserRole.user_id == User.id, UserRole.user_role == role, UserRole.value.is_(True)
        )
        statement = statement.where(has_role)
    return [_build_caller(row) for row in session.execute(statement.limit(limit))]


def find_account_by_alias(session: Session, alias: str) -> Caller | None:
    """The facts of the account with the alias `username#id`, read fresh; None for no such one."""
    user_id = _parse_alias(alias)
    account = None if user_id is None else find_account(session, user_id)
    return account if account is not None and account.alias == alias else None


def find_user_by_alias(session: Session, alias: str) -> User | None:
    """The account with the alias `username#id`, whose two parts have to agree; None otherwise."""
    user_id = _parse_alias(alias)
    user = None if user_id is None else session.get(User, user_id)
    is_meant = user is not None and user.alias == alias and user.oauth_id != WIPED
    return user if is_meant else None


def _parse_alias(alias: str) -> int | None:
    """The id in an alias; None when it cannot be one."""
    _, separator, number = alias.rpartition("#")
    return parse_user_id(number) if separator else None


def find_user_by_identity(session: Session, oauth_id: str) -> User | None:
    """The account of an identity; None when nobody has it, or only accounts that were erased."""
    return session.scalars(
        select(User).where(User.oauth_id == oauth_id, User.oauth_id != WIPED)
    ).one_or_none()


def parse_user_id(text: str) -> int | None:
    """A user id as it stands in a path; None for what cannot be one, such as a number that no
    column holds.
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(MAX_USER_ID)):
        return None
    return int(text) if int(text) <= MAX_USER_ID else None


def parse_uuid(text: str) -> UUID | None:
    """A UUID, None when the text is none."""
    try:
        return UUID(text)
    except ValueError:
        return None


def _select_accounts() -> Select[Any]:
    roles = select(cast(UserRole.user_role, Text)).where(
        UserRole.user_id == User.id, UserRole.value.is_(True)
    )
    return select(
        User.id,
        User.username,
        User.oauth_id,
        User.concurrency,
        User.kudos,
        User.usage_multiplier,
        User.worker_invited,
        User.public_workers,
        User.created,
        func.array(roles.scalar_subquery(), type_=ARRAY(Text)).label("roles"),
    )


_ACCOUNT_OF_KEY = keep(
    _select_accounts().where(User.api_key == bindparam("key_hash"), User.oauth_id != WIPED)
)


def _build_caller(row: Row[Any]) -> Caller:
    return Caller(
        id=row.id,
        username=row.username,
        oauth_id=row.oauth_id,
        roles=frozenset(UserRoleTypes[name] for name in row.roles),
        concurrency=row.concurrency,
        kudos=row.kudos,
        usage_multiplier=row.usage_multiplier,
        worker_invited=row.worker_invited,
        public_workers=row.public_workers,
        created=row.created,
    )


def build_lease_key_of(api_key: str) -> str:
    """What the lease of a streamed job keeps of its owner's key, for a post to be compared with; no
    statement.
    """
    return build_lease_owner_key(_hash_key(api_key))


def get_secret_key() -> str:
    """The secret that hashes are made with."""
    secret_key = state.get().secret_key
    if secret_key is None:
        raise RuntimeError("Accounts are not configured: call users.configure(config) first.")
    return secret_key


def _hash_key(api_key: str) -> str:
    return hash_api_key(api_key, get_secret_key())


# Shared keys


def charge_shared_key(session: Session, sharedkey_id: UUID, amount: Decimal) -> None:
    """Take a charge off a shared key's budget, in one update; an empty key is not touched, an
    unlimited one only counts.

    Budgets are whole kudos: each charge is rounded. Clamped at 0, since the job was made and its
    owner pays the rest.
    """
    spent = func.round(amount)
    session.execute(
        update(UserSharedKey)
        .where(UserSharedKey.id == sharedkey_id, UserSharedKey.kudos != 0)
        .values(
            kudos=case(
                (UserSharedKey.kudos == -1, -1), else_=func.greatest(UserSharedKey.kudos - spent, 0)
            ),
            utilized=UserSharedKey.utilized + spent,
        )
        .execution_options(synchronize_session=False)
    )


# Making and changing accounts


def create_user(
    session: Session, *, username: str, oauth_id: str | None = None, now: datetime
) -> NewAccount:
    """Make an account with a new key; without an `oauth_id` it is pseudonymous. `username` is taken
    as it is.
    """
    api_key = generate_api_key()
    user = User(
        username=username,
        oauth_id=str(uuid4()) if oauth_id is None else oauth_id,
        api_key=_hash_key(api_key),
        created=now,
        last_active=now,
        roles=[],
    )
    session.add(user)
    session.flush()
    return NewAccount(user, api_key)


def reset_api_key(session: Session, user_id: int) -> str:
    """Give an account a new key, which ends the old one; returns it."""
    api_key = generate_api_key()
    session.execute(
        update(User)
        .where(User.id == user_id)
        .values(api_key=_hash_key(api_key))
        .execution_options(synchronize_session=False)
    )
    announce_change(session, user_id)
    return api_key


def set_role(
    session: Session, user_id: int, role: UserRoleTypes, *, granted: bool, now: datetime
) -> None:
    """Grant or revoke a role, with what follows from it.

    A moderator is trusted too. Trust lets paused workers work and drains the escrow at the next
    fold. An education account has at least 200 requests at once. Raises Forbidden for the anonymous
    account, which holds no role, and BadRequest for marking a moderator as deleted.
    """
    if user_id == ANONYMOUS_ID:
        raise Forbidden(
            "The anonymous account cannot hold a role.", ReturnCode.ANON_FORBIDDEN_USER_MOD
        )
    if not granted:
        session.execute(
            delete(UserRole).where(UserRole.user_id == user_id, UserRole.user_role == role)
        )
    else:
        if role is UserRoleTypes.DELETED and _has_role(session, user_id, UserRoleTypes.MODERATOR):
            raise BadRequest("A moderator's account cannot be deleted.")
        implied = (role, UserRoleTypes.TRUSTED) if role is UserRoleTypes.MODERATOR else (role,)
        for each in implied:
            _grant(session, user_id, each, now)
    if role is UserRoleTypes.EDUCATION:
        _adjust_education_concurrency(session, user_id, granted=granted)
    if role in _ROLES_OF_OWNERS:
        announce_owner_change(session, user_id)
    if granted and role in _ROLES_WITHOUT_WORKERS:
        take_workers_offline(session, TextWorker.user_id == user_id, now)
    announce_change(session, user_id)


def announce_change(session: Session, user_id: int) -> None:
    """Once committed, make every process read the account anew."""
    after_commit(session, partial(publish_account_change, user_id))


def adjust_kudos(
    session: Session, user_id: int, amount: Decimal, *, action: str, now: datetime
) -> None:
    """Book an administrative change of a balance, shown under `action` (`admin`, `recurring`)."""
    movements = Movements(
        currencies=(
            Currency(user_id=user_id, entry_type=EntryType.ADMIN_ADJUSTMENT, amount=amount),
        ),
        statistics=(
            Statistic(
                entry_type=EntryType.ADMIN_ADJUSTMENT,
                target=StatTarget.USER_STATS,
                name=action,
                amount=amount,
                user_id=user_id,
            ),
        ),
    )
    kudos.append_movements(session, uuid4(), movements, now)


def _has_role(session: Session, user_id: int, role: UserRoleTypes) -> bool:
    held = exists().where(
        UserRole.user_id == user_id, UserRole.user_role == role, UserRole.value.is_(True)
    )
    return bool(session.scalar(select(held)))


def _grant(session: Session, user_id: int, role: UserRoleTypes, now: datetime) -> None:
    session.execute(
        insert(UserRole)
        .values(user_id=user_id, user_role=role, value=True)
        .on_conflict_do_update(
            index_elements=[UserRole.user_id, UserRole.user_role], set_={"value": True}
        )
    )
    if role is not UserRoleTypes.TRUSTED:
        return
    session.execute(
        update(Worker)
        .where(Worker.user_id == user_id, Worker.paused.is_(True))
        .values(paused=False)
        .execution_options(synchronize_session=False)
    )
    # Nothing but the applier moves balances: a posting of nothing makes it look at the account,
    # find it trusted, and drain.
    look = Currency(
        user_id=user_id,
        entry_type=EntryType.EVALUATION_PROMOTION,
        amount=Decimal(0),
        account=Account.ESCROW,
    )
    kudos.append_movements(session, uuid4(), Movements(currencies=(look,)), now)


def _adjust_education_concurrency(session: Session, user_id: int, *, granted: bool) -> None:
    statement = update(User).where(User.id == user_id).execution_options(synchronize_session=False)
    if granted:
        session.execute(
            statement.where(User.concurrency < EDUCATION_CONCURRENCY).values(
                concurrency=EDUCATION_CONCURRENCY
            )
        )
    else:
        session.execute(
            statement.where(User.concurrency == EDUCATION_CONCURRENCY).values(
                concurrency=DEFAULT_CONCURRENCY
            )
        )


# Settings of an account that are plain columns


def update_account(session: Session, user_id: int, values: Mapping[str, object]) -> None:
    """Write columns of an account that only it and moderators change."""
    if values:
        session.execute(
            update(User)
            .where(User.id == user_id)
            .values(**values)
            .execution_options(synchronize_session=False)
        )
        announce_change(session, user_id)

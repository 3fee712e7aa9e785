# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde worker`: look at workers, pause them, put them into maintenance, and write to them."""

import argparse
import json
from collections.abc import Callable

from pydantic import ValidationError

from horde import redis_ctrl
from horde.actions import worker_messages, workers
from horde.actions.actors import OPERATOR
from horde.cli._operating import CommandRefused, run_on_database
from horde.config import Config
from horde.database.workers import parse_id
from horde.json_text import JsonObject
from horde.shapes.base import ModelType
from horde.shapes.worker_messages import WorkerMessageInput
from horde.shapes.workers import ModifyWorkerInput, WorkersQuery
from horde.written_answer import WrittenAnswer

EXIT_REFUSED = 1
DEFAULT_EXPIRY_HOURS = 12
READING = frozenset({"list", "show"})

type Details = JsonObject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions. A worker is named by its id or its exact name."""
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="list the online workers, the oldest first")
    actions.add_parser("show", help="show one worker, online or not")
    actions.add_parser("pause", help="give a worker nothing to earn, without telling it")
    actions.add_parser("resume", help="end a pause")
    maintenance = actions.add_parser("maintenance", help="give a worker its owner's jobs alone")
    maintenance.add_argument("--message", help="what its pops are told")
    actions.add_parser("serve", help="end a maintenance")
    actions.add_parser("delete", help="delete a worker that has no jobs")
    message = actions.add_parser("message", help="write to workers, without a choice to all")
    message.add_argument("text")
    message.add_argument("--worker", action="append", metavar="WORKER", help="to it; may repeat")
    message.add_argument("--type", choices=[*ModelType], help="to all of a kind")
    message.add_argument(
        "--hours", type=int, default=DEFAULT_EXPIRY_HOURS, help="how long it is told (%(default)s)"
    )
    message.add_argument("--origin", help="whom it is from")
    for name, action in actions.choices.items():
        if name not in {"list", "message"}:
            action.add_argument("worker")
        if name not in {*READING, "message"}:
            action.add_argument("--reason", help="why; kept in the list of acts")
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Do what was asked and print the result on stdout; the exit code."""
    return run_on_database("worker", lambda config: act(config, args), refused_code=EXIT_REFUSED)


def act(config: Config, args: argparse.Namespace) -> int:
    """Read or change as the operator, and print what came of it."""
    # Running servers learn of a change through it.
    redis_ctrl.connect(config)
    changes: dict[str, Callable[[argparse.Namespace], Details]] = {
        "show": lambda args: workers.show_worker(OPERATOR, find_worker_id(args.worker)),
        "pause": lambda args: change(args, paused=True),
        "resume": lambda args: change(args, paused=False),
        "maintenance": lambda args: change(args, maintenance=True, maintenance_msg=args.message),
        "serve": lambda args: change(args, maintenance=False),
        "delete": delete,
        "message": write,
    }
    try:
        if args.action == "list":
            listed = list_online()
            print(json.dumps(listed) if args.json else build_table(listed))
        else:
            result = changes[args.action](args)
            print(json.dumps(result) if args.json else build_lines(result))
    except ValidationError as error:
        raise CommandRefused(
            "; ".join(f"{entry['loc'][0]}: {entry['msg']}" for entry in error.errors())
        ) from None
    return 0


def list_online() -> list[Details]:
    """The online workers as moderators see them."""
    listed = workers.list_workers(OPERATOR, WorkersQuery())
    details: list[Details] = listed.read() if isinstance(listed, WrittenAnswer) else listed
    return details


def find_worker_id(name: str) -> str:
    """The id of a worker named by it or by its name; raises NotFound."""
    if parse_id(name) is not None:
        return name
    return str(workers.show_worker_by_name(OPERATOR, name)["id"])


def change(args: argparse.Namespace, **changes: object) -> Details:
    """Change a worker; what was changed of which."""
    worker_id = find_worker_id(args.worker)
    body = ModifyWorkerInput.model_validate({**changes, "reason": args.reason})
    return {"id": worker_id, **workers.change_worker(OPERATOR, worker_id, body).dump()}


def delete(args: argparse.Namespace) -> Details:
    """Delete a worker; which it was."""
    return workers.delete_worker(OPERATOR, find_worker_id(args.worker), args.reason).dump()


def write(args: argparse.Namespace) -> Details:
    """Write to workers; the message, or the first of several."""
    named = None if args.worker is None else [find_worker_id(name) for name in args.worker]
    body = WorkerMessageInput.model_validate(
        {
            "message": args.text,
            "worker_ids": named,
            "worker_type": args.type,
            "expiry": args.hours,
            "origin": args.origin,
        }
    )
    return worker_messages.post_message(OPERATOR, body).dump()


def build_table(listed: list[Details]) -> str:
    """One line a worker."""
    return "\n".join(
        f"{worker['id']}  {worker['name']:<40}  {describe_state(worker):<12}  {worker['owner']}"
        for worker in listed
    )


def describe_state(worker: Details) -> str:
    """Whether a worker serves, in a word."""
    if worker.get("paused"):
        return "paused"
    return "maintenance" if worker["maintenance_mode"] else "serving"


def build_lines(facts: Details) -> str:
    """One line a fact."""
    return "\n".join(
        f"{name + ':':<22}{value if isinstance(value, str) else json.dumps(value)}"
        for name, value in facts.items()
    )

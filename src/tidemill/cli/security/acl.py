"""`tidemill acl`: access control rules. They are Kafka's ACLs, the same rules that Kafka's admin API manages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.base.errors import InvalidError, MissingError, unknown_name_fix
from tidemill.cli.context import DRY_RUN, ConfigOption, DryRunOption, YesOption, confirm, open_stores
from tidemill.cli.output.output import TABLE, Output

if TYPE_CHECKING:
    from tidemill.security.acls import AclRule

app = typer.Typer(help="Add, list and delete access control rules (Kafka ACLs).", no_args_is_help=True)


@dataclass(frozen=True)
class RuleOptions:
    """Rules that a command names: one per operation."""

    principal: Annotated[str, typer.Argument(help="User:NAME, or User:* for every user.")]
    operations: Annotated[str, typer.Argument(help="read, write, create, … or all; separate several with commas.")]
    resource: Annotated[
        str,
        typer.Argument(help="topic:NAME, group:NAME, transactional_id:NAME or cluster; the name * matches every name."),
    ]
    prefix: Annotated[bool, typer.Option("--prefix", help="Match every resource whose name begins with NAME.")] = False
    host: Annotated[str, typer.Option(help="Client address that the rule matches, or * for every address.")] = "*"
    deny: Annotated[
        bool, typer.Option("--deny", help="Deny instead of allow. A matching deny rule overrides every allow rule.")
    ] = False


@app.command("add")
def add(named: RuleOptions, config: ConfigOption = None, out: Output = TABLE) -> None:
    """Allow operations on a resource, or deny them: `tidemill acl add User:alice read,describe topic:orders`."""
    from tidemill.security.acl_cache import AclCache

    rules = _build_rules(named)
    with open_stores(config, create=True) as opened:
        opened.portal.call(AclCache(opened.metastore, opened.clock).add(rules))
    _print_rules(rules, out)


@app.command("list")
def list_rules(
    principal: Annotated[str | None, typer.Option(help="Show only the rules of this principal.")] = None,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """List the access control rules."""
    from tidemill.security.acl_cache import AclCache
    from tidemill.security.acls import RuleFilter

    with open_stores(config) as opened:
        found = opened.portal.call(AclCache(opened.metastore, opened.clock).find(RuleFilter(principal=principal)))
    _print_rules(found, out)


@app.command("delete")
def delete(
    named: RuleOptions,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    out: Output = TABLE,
) -> None:
    """Delete the rules that `acl add` with the same arguments created."""
    from tidemill.security.acl_cache import AclCache
    from tidemill.security.acls import RuleFilter

    rules = _build_rules(named)
    with open_stores(config) as opened:
        rulebook = AclCache(opened.metastore, opened.clock)
        known = set(opened.portal.call(rulebook.find(RuleFilter(principal=named.principal))))
        missing = [rule for rule in rules if rule not in known]
        if missing:
            raise MissingError(f"no such rule: {_format_rule(missing[0])}.", fix="List them with: tidemill acl list")
        if not dry_run:
            what = "; ".join(map(_format_rule, rules))
            confirm(f"Delete these rules: {what}?", yes=yes, out=out)
            opened.portal.call(rulebook.delete(rules))
    rows: list[dict[str, object]] = [dict(_rule_fields(rule)) for rule in rules]
    if dry_run and out.is_text:
        print("dry run: delete these rules")
    elif dry_run:
        rows = [{**DRY_RUN, **row} for row in rows]
    out.rows(rows)


def _build_rules(named: RuleOptions) -> list[AclRule]:
    """Return one rule per operation. Raises InvalidError for an unknown resource type or operation."""
    from tidemill.security.acls import (
        CLUSTER_NAME,
        OPERATIONS,
        AclRule,
        Operation,
        Pattern,
        Permission,
        Resource,
        check_rule,
    )

    kind, separator, name = named.resource.partition(":")
    kinds = {each.name.lower(): each for each in OPERATIONS}
    if kind not in kinds:
        raise InvalidError(f"unknown resource type: resource={named.resource!r}.", fix=unknown_name_fix(kind, kinds))
    if kind == "cluster" and not separator:
        name = CLUSTER_NAME
    known = {each.name.lower(): each for each in (*OPERATIONS[Resource(kinds[kind])], Operation.ALL)}
    rules = []
    for word in named.operations.split(","):
        if word.strip().lower() not in known:
            raise InvalidError(f"unknown operation on a {kind}: operation={word!r}.", fix=unknown_name_fix(word, known))
        rule = AclRule(
            int(kinds[kind]),
            int(Pattern.PREFIXED if named.prefix else Pattern.LITERAL),
            name,
            named.principal,
            named.host,
            int(known[word.strip().lower()]),
            int(Permission.DENY if named.deny else Permission.ALLOW),
        )
        check_rule(rule)
        rules.append(rule)
    return rules


def _rule_fields(rule: AclRule) -> dict[str, str]:
    from tidemill.security.acls import Operation, Pattern, Permission, Resource

    return {
        "principal": rule.principal,
        "permission": Permission(rule.permission).name.lower(),
        "operation": Operation(rule.operation).name.lower(),
        "resource": Resource(rule.resource).name.lower(),
        "name": rule.name,
        "pattern": Pattern(rule.pattern).name.lower(),
        "host": rule.host,
    }


def _format_rule(rule: AclRule) -> str:
    row = _rule_fields(rule)
    name = f"{row['resource']}:{row['name']}{'* (prefix)' if row['pattern'] == 'prefixed' else ''}"
    return f"{row['permission']} {row['principal']} {row['operation']} {name} from {row['host']}"


def _print_rules(rules: list[AclRule], out: Output) -> None:
    out.rows([_rule_fields(rule) for rule in rules], empty="no rules")

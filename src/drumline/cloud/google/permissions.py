"""The permissions and APIs that Drumline needs, with the role that has each permission."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Permission:
    """A permission of Google Cloud."""

    name: str
    role: str
    """The smallest predefined role with this permission."""
    purpose: str
    required: bool = True
    """False if only some jobs need it."""


TPU_ADMIN = "roles/tpu.admin"
PERMISSIONS = (
    Permission("tpu.nodes.create", TPU_ADMIN, "request slices"),
    Permission("tpu.nodes.delete", TPU_ADMIN, "delete slices"),
    Permission("tpu.nodes.get", TPU_ADMIN, "read a slice, its addresses and its host keys"),
    Permission("tpu.nodes.list", TPU_ADMIN, "list the slices of a zone"),
    Permission("tpu.operations.get", TPU_ADMIN, "read why a creation failed"),
    Permission(
        "iam.serviceAccounts.actAs",
        "roles/iam.serviceAccountUser",
        "give the hosts their service account",
    ),
    Permission(
        "serviceusage.services.use",
        "roles/serviceusage.serviceUsageConsumer",
        "call the APIs with a user's login",
    ),
    Permission(
        "storage.objects.create",
        "roles/storage.objectAdmin",
        "write checkpoints, with the account of the hosts",
        required=False,
    ),
    Permission(
        "storage.buckets.get",
        "roles/storage.legacyBucketReader",
        "check the region of a bucket",
        required=False,
    ),
    Permission(
        "monitoring.timeSeries.list",
        "roles/monitoring.viewer",
        "read the health of hosts, with `witness: infra_health`",
        required=False,
    ),
    Permission(
        "iap.tunnelInstances.accessViaIAP",
        "roles/iap.tunnelResourceAccessor",
        "connect through IAP, with a `proxy_command` for it",
        required=False,
    ),
)
APIS = {
    "tpu.googleapis.com": "slices",
    "compute.googleapis.com": "the networks, disks and accounts of slices",
    "cloudresourcemanager.googleapis.com": "the permission test of `drumline init --probe`",
    "storage.googleapis.com": "buckets",
    "monitoring.googleapis.com": "`witness: infra_health`",
    "iap.googleapis.com": "connections through IAP",
}
"""The APIs to enable. Every project needs the first two."""

# The first pattern that matches a permission names the smallest predefined role that has it.
_ROLES: tuple[tuple[str, str], ...] = (
    (r"tpu\..*\.(?:get|list|getIamPolicy)", "roles/tpu.viewer, or roles/tpu.admin to run jobs"),
    (r"tpu\.", "roles/tpu.admin"),
    (r"iam\.serviceAccounts\.actAs", "roles/iam.serviceAccountUser"),
    (r"iam\.serviceAccounts\.(?:get(?:AccessToken|OpenIdToken)|sign|implicit)",
     "roles/iam.serviceAccountTokenCreator"),
    (r"iam\.serviceAccounts\.(?:get|list)$", "roles/iam.serviceAccountViewer"),
    (r"iam\.", "roles/iam.serviceAccountAdmin"),
    (r"serviceusage\.services\.(?:enable|disable)", "roles/serviceusage.serviceUsageAdmin"),
    (r"serviceusage\.", "roles/serviceusage.serviceUsageConsumer"),
    (r"compute\.(?:sub)?networks\.use|compute\.addresses\.use", "roles/compute.networkUser"),
    (r"compute\.firewalls\.(?:create|delete|update)", "roles/compute.securityAdmin"),
    (r"compute\..*\.(?:get|list)", "roles/compute.viewer"),
    (r"compute\.(?:instances|disks|projects\.setCommonInstanceMetadata)",
     "roles/compute.instanceAdmin.v1"),
    (r"compute\.", "roles/compute.admin"),
    (r"storage\.objects\.(?:get|list)", "roles/storage.objectViewer"),
    (r"storage\.objects\.", "roles/storage.objectAdmin"),
    (r"storage\.buckets\.get", "roles/storage.legacyBucketReader"),
    (r"storage\.", "roles/storage.admin"),
    (r"resourcemanager\.projects\.get", "roles/browser"),
    (r"cloudquotas\.", "roles/cloudquotas.viewer"),
    (r"monitoring\.", "roles/monitoring.viewer"),
    (r"iap\.", "roles/iap.tunnelResourceAccessor"),
    (r"logging\.", "roles/logging.logWriter"),
    (r"artifactregistry\.", "roles/artifactregistry.reader"),
    (r"secretmanager\.", "roles/secretmanager.secretAccessor"),
)  # fmt: skip


def role_of(permission: str) -> str:
    """Return `the role roles/…` for any permission that an error names."""
    role = next((role for pattern, role in _ROLES if re.match(pattern, permission)), None)
    return f"the role {role}" if role else "a role that has it"

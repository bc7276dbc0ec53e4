"""The permissions and APIs that Drumline needs, with the role that has each permission."""

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

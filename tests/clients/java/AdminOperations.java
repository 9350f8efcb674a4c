import java.util.Collection;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.Callable;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.NewPartitionReassignment;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionReplica;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.quota.ClientQuotaAlteration;
import org.apache.kafka.common.quota.ClientQuotaEntity;
import org.apache.kafka.common.quota.ClientQuotaFilter;

/** Everything else that Java's admin client can ask: of each operation its answer, or the name of its error. */
final class AdminOperations {
    private final Map<String, Object> found = new LinkedHashMap<>();
    private final Admin admin;

    AdminOperations(Admin admin) {
        this.admin = admin;
    }

    private void ask(String name, Callable<Object> operation) {
        try {
            found.put(name, operation.call());
        } catch (Throwable raised) {
            Throwable cause = raised.getCause() == null ? raised : raised.getCause();
            found.put(name, Errors.forException(cause).name());
        }
    }

    /** Of a topic with one partition and ten records, and a group that has committed in it and has no members. */
    Map<String, Object> all(String topic, String group) {
        TopicPartition place = new TopicPartition(topic, 0);
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        ask("cluster", () -> admin.describeCluster().nodes().get().size());
        ask("topic by id", () -> {
            TopicDescription one = admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic);
            Collection<Uuid> ids = List.of(one.topicId());
            return admin.describeTopics(TopicCollection.ofTopicIds(ids)).allTopicIds().get().get(one.topicId()).name();
        });
        ask("topic by an unknown id", () -> admin.describeTopics(TopicCollection.ofTopicIds(
            List.of(Uuid.randomUuid()))).allTopicIds().get());
        ask("earliest local", () -> offset(place, OffsetSpec.earliestLocal()));
        ask("latest tiered", () -> offset(place, OffsetSpec.latestTiered()));
        ask("committed end", () -> admin.listOffsets(Map.of(place, OffsetSpec.latest()),
            new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).partitionResult(place).get().offset());
        ask("broker configs", () -> admin.describeConfigs(List.of(broker)).all().get().get(broker).entries().size() > 20);
        ask("alter a broker", () -> admin.incrementalAlterConfigs(Map.of(broker, List.of(new AlterConfigOp(
            new ConfigEntry("log.retention.ms", "1"), AlterConfigOp.OpType.SET)))).all().get());
        ask("config resources", () -> admin.listConfigResources().all().get().size() > 1);
        ask("log dirs", () -> admin.describeLogDirs(List.of(1)).allDescriptions().get().get(1).size());
        ask("replica log dirs", () -> admin.alterReplicaLogDirs(
            Map.of(new TopicPartitionReplica(topic, 0, 1), "/elsewhere")).all().get());
        ask("elect leaders", () -> {
            Map<TopicPartition, Optional<Throwable>> done =
                admin.electLeaders(ElectionType.PREFERRED, Set.of(place)).partitions().get();
            return done.get(place).map(error -> Errors.forException(error).name()).orElse("NONE");
        });
        ask("reassign", () -> admin.alterPartitionReassignments(
            Map.of(place, Optional.of(new NewPartitionReassignment(List.of(1, 2))))).all().get());
        ask("reassignments", () -> admin.listPartitionReassignments().reassignments().get().size());
        ask("producers", () -> admin.describeProducers(List.of(place)).partitionResult(place).get().activeProducers().size());
        ask("an unknown transaction", () -> admin.describeTransactions(List.of("nobody's")).description("nobody's").get());
        ask("fence producers", () -> admin.fenceProducers(List.of("fenced")).all().get());
        ask("fenced transaction", () -> admin.describeTransactions(List.of("fenced")).description("fenced").get()
            .state().name());
        ask("set offsets", () -> admin.alterConsumerGroupOffsets(group, Map.of(place, new OffsetAndMetadata(3, "m"))).all().get());
        ask("offset that was set", () -> {
            OffsetAndMetadata one = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().get(place);
            return one.offset() + one.metadata();
        });
        ask("delete offsets", () -> admin.deleteConsumerGroupOffsets(group, Set.of(place)).all().get());
        ask("remove members", () -> admin.removeMembersFromConsumerGroup(group,
            new RemoveMembersFromConsumerGroupOptions(Set.of(new MemberToRemove("nobody")))).all().get());
        ask("an unknown group", () -> admin.describeConsumerGroups(List.of("nobody's")).all().get());
        ask("delete an unknown group", () -> admin.deleteConsumerGroups(List.of("nobody's")).all().get());
        ask("group operations", () -> admin.describeConsumerGroups(List.of(group),
            new org.apache.kafka.clients.admin.DescribeConsumerGroupsOptions().includeAuthorizedOperations(true))
            .all().get().get(group).authorizedOperations().contains(AclOperation.READ));
        ClientQuotaEntity user = new ClientQuotaEntity(Map.of(ClientQuotaEntity.USER, "alice"));
        ask("set a quota", () -> admin.alterClientQuotas(List.of(new ClientQuotaAlteration(user,
            List.of(new ClientQuotaAlteration.Op("producer_byte_rate", 1e6))))).all().get());
        ask("quotas", () -> admin.describeClientQuotas(ClientQuotaFilter.all()).entities().get().get(user));
        ask("an unknown quota", () -> admin.alterClientQuotas(List.of(new ClientQuotaAlteration(user,
            List.of(new ClientQuotaAlteration.Op("coffee_rate", 1.0))))).all().get());
        ask("scram users", () -> admin.describeUserScramCredentials().all().get().size());
        ask("features", () -> new HashMap<>(admin.describeFeatures().featureMetadata().get().finalizedFeatures()).keySet());
        ask("metadata quorum", () -> admin.describeMetadataQuorum().quorumInfo().get());
        ask("delegation tokens", () -> admin.describeDelegationToken().delegationTokens().get());
        ask("unregister a broker", () -> admin.unregisterBroker(9).all().get());
        ask("share groups", () -> admin.describeShareGroups(List.of("s")).all().get());
        ask("streams groups", () -> admin.describeStreamsGroups(List.of("s")).all().get());
        return found;
    }

    private long offset(TopicPartition place, OffsetSpec spec) throws Exception {
        return admin.listOffsets(Map.of(place, spec)).partitionResult(place).get().offset();
    }
}

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclBindingFilter;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.common.utils.Exit;

/** Apache Kafka's own Java clients, driven by lines of JSON; the verbs are those of tests/kafka/foreign.py. */
public final class KafkaDriver {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration SHORT = Duration.ofMillis(100);

    private final Map<String, Object> connection = new HashMap<>();
    private final Map<String, Member> members = new HashMap<>();
    private final Map<String, KafkaProducer<String, String>> producers = new HashMap<>();
    private Admin admin;

    public static void main(String[] args) throws Exception {
        PrintStream out = System.out;
        KafkaDriver driver = new KafkaDriver();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            Map<String, Object> answer = new HashMap<>();
            try {
                answer.put("ok", driver.run(JSON.readTree(line)));
            } catch (Throwable raised) {
                Throwable cause = raised;
                while (cause.getCause() != null && Errors.forException(cause) == Errors.UNKNOWN_SERVER_ERROR) {
                    cause = cause.getCause();
                }
                answer.put("error", (int) Errors.forException(cause).code());
                answer.put("message", cause.toString());
            }
            out.println(JSON.writeValueAsString(answer));
            out.flush();
        }
        Runtime.getRuntime().halt(0);
    }

    private Object run(JsonNode asked) throws Exception {
        switch (asked.get("do").asText()) {
            case "connect": return connect(asked);
            case "produce": return produce(asked);
            case "read": return read(asked);
            case "join": return join(asked);
            case "state": return members.get(text(asked, "member")).state();
            case "leave": return members.remove(text(asked, "member")).end();
            case "begin": return begin(asked);
            case "send": return sent(producers.get(text(asked, "producer")), asked);
            case "end": return end(asked);
            case "close": producers.remove(text(asked, "producer")).close(Duration.ZERO); return true;
            case "transfer": return transfer(asked);
            case "tool": return tool(asked);
            case "operations": return new AdminOperations(admin).all(text(asked, "topic"), text(asked, "group"));
            default: return administer(asked);
        }
    }

    static String text(JsonNode asked, String name) {
        return asked.hasNonNull(name) ? asked.get(name).asText() : "";
    }

    private Object connect(JsonNode asked) throws Exception {
        connection.clear();
        connection.put("bootstrap.servers", text(asked, "bootstrap"));
        connection.put("key.serializer", StringSerializer.class.getName());
        connection.put("value.serializer", StringSerializer.class.getName());
        connection.put("key.deserializer", StringDeserializer.class.getName());
        connection.put("value.deserializer", StringDeserializer.class.getName());
        connection.put("retry.backoff.ms", 50);
        connection.put("metadata.max.age.ms", 1_000);
        connection.put("default.api.timeout.ms", 40_000);
        Security.of(asked, connection);
        if (admin != null) {
            admin.close(Duration.ZERO);
        }
        admin = Admin.create(connection);
        return true;
    }

    private Map<String, Object> with(Object... pairs) {
        Map<String, Object> found = new HashMap<>(connection);
        for (int at = 0; at < pairs.length; at += 2) {
            found.put((String) pairs[at], pairs[at + 1]);
        }
        return found;
    }

    private Object produce(JsonNode asked) throws Exception {
        boolean idempotent = asked.get("idempotent").asBoolean();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(with(
            "enable.idempotence", idempotent, "acks", idempotent ? "all" : "1",
            "compression.type", text(asked, "compression"), "linger.ms", 1))) {
            return sent(producer, asked);
        }
    }

    private static Object sent(KafkaProducer<String, String> producer, JsonNode asked) throws Exception {
        List<Future<RecordMetadata>> ends = new ArrayList<>();
        for (JsonNode record : asked.get("records")) {
            ends.add(producer.send(new ProducerRecord<>(text(asked, "topic"), record.get(0).asInt(),
                record.get(1).textValue(), record.get(2).textValue())));
        }
        producer.flush();
        List<Long> offsets = new ArrayList<>();
        for (Future<RecordMetadata> end : ends) {
            offsets.add(end.get().offset());
        }
        return offsets;
    }

    private Object read(JsonNode asked) {
        int count = asked.get("count").asInt();
        List<Object> found = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(with(
            "isolation.level", text(asked, "isolation"), "auto.offset.reset", "earliest",
            "enable.auto.commit", false))) {
            List<TopicPartition> all = new ArrayList<>();
            for (int partition = 0; partition < asked.get("partitions").asInt(); partition++) {
                all.add(new TopicPartition(text(asked, "topic"), partition));
            }
            consumer.assign(all);
            consumer.seekToBeginning(all);
            while (found.size() < count) {
                for (ConsumerRecord<String, String> record : consumer.poll(SHORT)) {
                    found.add(shown(record));
                }
            }
        }
        return found;
    }

    private static List<Object> shown(ConsumerRecord<String, String> record) {
        List<Object> found = new ArrayList<>();
        found.add(record.partition());
        found.add(record.offset());
        found.add(record.key());
        found.add(record.value());
        return found;
    }

    private Object join(JsonNode asked) {
        Map<String, Object> config = with("group.id", text(asked, "group"), "auto.offset.reset", "earliest",
            "enable.auto.commit", false);
        if (!text(asked, "instance").isEmpty()) {
            config.put("group.instance.id", text(asked, "instance"));
        }
        if (text(asked, "strategy").equals("consumer")) {
            config.put("group.protocol", "consumer");
        } else {
            config.put("session.timeout.ms", 10_000);
            config.put("heartbeat.interval.ms", 300);
            config.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer."
                + (text(asked, "strategy").equals("eager") ? "RangeAssignor" : "CooperativeStickyAssignor"));
        }
        Member member = new Member(new KafkaConsumer<>(config), text(asked, "topic"));
        member.start();
        members.put(text(asked, "member"), member);
        return true;
    }

    /** A consumer of a group that commits what it got; the thread alone touches the consumer. */
    private static final class Member extends Thread implements ConsumerRebalanceListener {
        private final KafkaConsumer<String, String> consumer;
        private final String topic;
        private final Set<Integer> assigned = new TreeSet<>();
        private final List<Object> got = new ArrayList<>();
        private int assignments;
        private int revoked;
        private String failed = "";
        private volatile boolean ending;

        Member(KafkaConsumer<String, String> consumer, String topic) {
            this.consumer = consumer;
            this.topic = topic;
        }

        @Override
        public void run() {
            try (consumer) {
                consumer.subscribe(List.of(topic), this);
                while (!ending) {
                    ConsumerRecords<String, String> records = consumer.poll(SHORT);
                    synchronized (this) {
                        for (ConsumerRecord<String, String> record : records) {
                            got.add(shown(record));
                        }
                    }
                    if (!records.isEmpty()) {
                        consumer.commitSync();
                    }
                }
            } catch (RuntimeException error) {
                synchronized (this) {
                    failed = error.toString();
                }
            }
        }

        @Override
        public synchronized void onPartitionsAssigned(Collection<TopicPartition> added) {
            assignments++;
            added.forEach(partition -> assigned.add(partition.partition()));
        }

        @Override
        public synchronized void onPartitionsRevoked(Collection<TopicPartition> taken) {
            revoked += taken.size();
            taken.forEach(partition -> assigned.remove(partition.partition()));
        }

        synchronized Object state() {
            return Map.of("assigned", List.copyOf(assigned), "assignments", assignments, "revoked", revoked,
                "got", List.copyOf(got), "failed", failed);
        }

        Object end() throws InterruptedException {
            ending = true;
            join();
            return state();
        }
    }

    private Object begin(JsonNode asked) {
        String name = text(asked, "producer");
        KafkaProducer<String, String> producer = producers.get(name);
        if (producer == null) {
            producer = new KafkaProducer<>(with("transactional.id", text(asked, "id"), "max.block.ms", 30_000,
                "transaction.timeout.ms", asked.get("timeout_ms").asInt()));
            producers.put(name, producer);
            producer.initTransactions();
        }
        producer.beginTransaction();
        return true;
    }

    private Object end(JsonNode asked) {
        KafkaProducer<String, String> producer = producers.get(text(asked, "producer"));
        if (asked.get("commit").asBoolean()) {
            producer.commitTransaction();
        } else {
            producer.abortTransaction();
        }
        return true;
    }

    /** Reads from one topic in a group and writes to another, offsets and records in one transaction a poll. */
    private Object transfer(JsonNode asked) {
        int left = asked.get("count").asInt();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(with("group.id", text(asked, "group"),
                "auto.offset.reset", "earliest", "enable.auto.commit", false, "isolation.level", "read_committed"));
            KafkaProducer<String, String> producer = new KafkaProducer<>(with("transactional.id", text(asked, "id")))) {
            producer.initTransactions();
            consumer.subscribe(List.of(text(asked, "topic")));
            while (left > 0) {
                ConsumerRecords<String, String> records = consumer.poll(SHORT);
                if (records.isEmpty()) {
                    continue;
                }
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> ends = new HashMap<>();
                for (ConsumerRecord<String, String> record : records) {
                    producer.send(new ProducerRecord<>(text(asked, "to"), record.partition(), record.key(),
                        record.value()));
                    ends.put(new TopicPartition(record.topic(), record.partition()),
                        new OffsetAndMetadata(record.offset() + 1));
                }
                producer.sendOffsetsToTransaction(ends, consumer.groupMetadata());
                producer.commitTransaction();
                left -= records.count();
            }
        }
        return left;
    }

    /** One of Kafka's command-line tools, in this process: [exit code, what it printed]. */
    private static Object tool(JsonNode asked) throws Exception {
        List<String> words = new ArrayList<>();
        asked.get("args").forEach(word -> words.add(word.asText()));
        ByteArrayOutputStream said = new ByteArrayOutputStream();
        PrintStream before = System.out;
        List<Integer> codes = new ArrayList<>();
        List<Runnable> hooks = new ArrayList<>();
        Exit.setExitProcedure((status, message) -> {
            codes.add(status); // of several the first counts: some tools catch what ends them here
            throw new Exited();
        });
        Exit.setShutdownHookAdder((name, hook) -> hooks.add(hook));
        try (PrintStream out = new PrintStream(said, true, StandardCharsets.UTF_8)) {
            System.setOut(out);
            System.setErr(out);
            System.setIn(new ByteArrayInputStream(text(asked, "input").getBytes(StandardCharsets.UTF_8)));
            Class.forName(text(asked, "class")).getMethod("main", String[].class)
                .invoke(null, (Object) words.toArray(new String[0]));
        } catch (InvocationTargetException raised) {
            if (!(raised.getCause() instanceof Exited)) {
                throw raised;
            }
        } finally {
            hooks.forEach(Runnable::run);
            System.setOut(before);
            System.setErr(before);
        }
        return List.of(codes.isEmpty() ? 0 : codes.get(0), said.toString(StandardCharsets.UTF_8));
    }

    private static final class Exited extends RuntimeException {
        private static final long serialVersionUID = 1L;
    }

    private Object administer(JsonNode asked) throws InterruptedException, ExecutionException {
        String topic = text(asked, "topic");
        String group = text(asked, "group");
        TopicPartition place = new TopicPartition(topic, asked.has("partition") ? asked.get("partition").asInt() : 0);
        switch (asked.get("do").asText()) {
            case "create": {
                Map<String, String> configs = new HashMap<>();
                asked.get("configs").fields().forEachRemaining(one -> configs.put(one.getKey(), one.getValue().asText()));
                NewTopic wanted = new NewTopic(topic, Optional.of(asked.get("partitions").asInt()), Optional.empty());
                admin.createTopics(List.of(wanted.configs(configs))).all().get();
                return true;
            }
            case "delete":
                admin.deleteTopics(List.of(topic)).all().get();
                return true;
            case "topics":
                return admin.listTopics().names().get();
            case "describe":
                return admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size();
            case "grow":
                admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(asked.get("partitions").asInt()))).all().get();
                return true;
            case "truncate":
                return admin.deleteRecords(Map.of(place, RecordsToDelete.beforeOffset(asked.get("offset").asLong())))
                    .lowWatermarks().get(place).get().lowWatermark();
            case "offset": {
                long at = asked.get("at").asLong();
                OffsetSpec spec = at == -1 ? OffsetSpec.latest() : at == -2 ? OffsetSpec.earliest()
                    : at == -3 ? OffsetSpec.maxTimestamp() : OffsetSpec.forTimestamp(at);
                return admin.listOffsets(Map.of(place, spec)).partitionResult(place).get().offset();
            }
            case "configs": {
                Map<String, String> found = new TreeMap<>();
                ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
                for (ConfigEntry entry : admin.describeConfigs(List.of(resource)).all().get().get(resource).entries()) {
                    found.put(entry.name(), entry.value());
                }
                return found;
            }
            case "alter": {
                List<AlterConfigOp> changes = new ArrayList<>();
                asked.get("configs").fields().forEachRemaining(one -> changes.add(new AlterConfigOp(
                    new ConfigEntry(one.getKey(), one.getValue().textValue()),
                    one.getValue().isNull() ? AlterConfigOp.OpType.DELETE : AlterConfigOp.OpType.SET)));
                admin.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.TOPIC, topic), changes)).all().get();
                return true;
            }
            case "groups": {
                List<String> found = new ArrayList<>();
                admin.listGroups().all().get().forEach(one -> found.add(one.groupId()));
                return found;
            }
            case "group": {
                ConsumerGroupDescription one = admin.describeConsumerGroups(List.of(group)).all().get().get(group);
                return Map.of("state", one.groupState().toString(), "members", one.members().size());
            }
            case "delete_group":
                admin.deleteConsumerGroups(List.of(group)).all().get();
                return true;
            case "committed": {
                Map<String, Long> found = new TreeMap<>();
                admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().forEach((at, offset) -> {
                    if (at.topic().equals(topic)) {
                        found.put(Integer.toString(at.partition()), offset.offset());
                    }
                });
                return found;
            }
            case "acl_add":
                admin.createAcls(List.of(readable(topic, text(asked, "principal")))).all().get();
                return true;
            case "acls":
                return admin.describeAcls(AclBindingFilter.ANY).values().get().size();
            case "acl_delete":
                return admin.deleteAcls(List.of(readable(topic, text(asked, "principal")).toFilter())).all().get().size();
            default:
                throw new IllegalArgumentException("no such verb: " + asked);
        }
    }

    private static AclBinding readable(String topic, String principal) {
        return new AclBinding(new ResourcePattern(ResourceType.TOPIC, topic, PatternType.LITERAL),
            new AccessControlEntry(principal, "*", AclOperation.READ, AclPermissionType.ALLOW));
    }
}
